"""The table of all names of SGLang that the plugin relies on, by release.

`sglang_api.py` looks these names up while the server runs; the tests look for every one of them in
the wheels of all supported releases, without importing or starting anything. Both sides are held
to the table: a test compares it with the names that sglang_api.py asks for.

A place is `module`, `module:name`, `module:Class.attribute` or `module:Class.method`. A target with
several places has moved between releases, and is there when any one of them is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Releases of SGLang that are supported, oldest first; any newer one is taken to be.
RELEASES: Final = (
    "0.5.11",
    "0.5.12", "0.5.12.post1",
    "0.5.13", "0.5.13.post1",
    "0.5.14",
    "0.5.15", "0.5.15.post1",
    "0.5.16", "0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Symbol:
    """One name that must exist in SGLang."""

    places: tuple[str, ...]
    why: str
    parameters: tuple[str, ...] = ()  # its first ones, without self and cls
    value: str | None = None  # of a constant
    calls: str | None = None  # the function that its body must call
    since: str = RELEASES[0]  # first release that has it
    until: str | None = None  # first release without it; a name that goes unannounced is an error


#: Hooked in every release.
LOAD_MODEL: Final = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
INIT_FORWARD_BATCH: Final = "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new"

_RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner"
_BATCH = "sglang.srt.model_executor.forward_batch_info:ForwardBatch"
_MODE = "sglang.srt.model_executor.forward_batch_info:ForwardMode"
_MODEL_CONFIG = "sglang.srt.configs.model_config:ModelConfig"
_ARGS = "sglang.srt.server_args:ServerArgs"
_CONTEXT = "sglang.srt.runtime_context"
_PARALLEL = f"{_CONTEXT}:ParallelContext"
_PARALLEL_FIELDS = "sglang.srt.arg_groups.fields.parallel:Parallel"
_DP_ATTENTION = "sglang.srt.layers.dp_attention"
_SCHEDULE = "sglang.srt.managers.schedule_batch"

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater:WeightUpdater"
_UPDATE_REQUESTS = (
    "sglang.srt.managers.scheduler_update_weights_mixin:SchedulerUpdateWeightsMixin",
    "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager",
)

#: Methods that change the weights in memory; hooked in releases that have them. Loading a LoRA
#: adapter is not among them: an adapter acts on requests that name it, and ours do not.
WEIGHT_UPDATES: Final = (
    *(
        Symbol(
            places=tuple(f"{owner}.update_weights_from_{source}" for owner in (_RUNNER, _UPDATER)),
            why="hooked: new weights",
            until=until,
        )
        for source, until in (
            ("disk", None), ("tensor", None), ("ipc", None), ("distributed", "0.5.21"),
        )
    ),
    *(
        Symbol(places=(f"{_UPDATER}.{name}",), why="hooked: new weights", since="0.5.21")
        for name in (
            "load_weights_from_distributed", "begin_weight_update", "end_weight_update",
        )
    ),
)  # fmt: skip
#: Overwrites the weights if its action is RESET_ACTION.
CHECK_WEIGHTS: Final = Symbol(
    places=(f"{_RUNNER}.check_weights",),
    parameters=("action",),
    why="hooked: one action overwrites the weights",
)
RESET_ACTION: Final = "reset_tensors"
#: Releases the memory of the weights if its tags are empty or include WEIGHTS_TAG.
RELEASE_MEMORY: Final = Symbol(
    places=tuple(f"{owner}.release_memory_occupation" for owner in _UPDATE_REQUESTS),
    parameters=("recv_req",),
    why="hooked: the weights are lost",
)
WEIGHTS_TAG: Final = "weights"
#: Loads the weights of a server that starts with `--startup-weight-load-mode overlap`.
LATE_WEIGHTS: Final = Symbol(
    places=(f"{_RUNNER}.finalize_startup_weight_load",),
    since="0.5.18",
    why="hooked: the weights are there only now",
)
#: Called when the engine's label for the weights changes.
NEW_LABEL: Final = Symbol(
    places=("sglang.srt.managers.scheduler:Scheduler.record_weight_version_change",),
    parameters=("new_version",),
    since="0.5.19",
    why="hooked: the weights' label",
)
#: In older releases the scheduler learns the label only from weight update requests.
LABELLING_REQUESTS: Final = tuple(
    Symbol(
        places=tuple(f"{owner}.update_weights_from_{source}" for owner in _UPDATE_REQUESTS),
        parameters=("recv_req",),
        until="0.5.19",
        why="hooked: the weights' label",
    )
    for source in ("disk", "tensor", "ipc", "distributed")
)
HOOKED: Final = (
    *WEIGHT_UPDATES, CHECK_WEIGHTS, RELEASE_MEMORY, LATE_WEIGHTS, NEW_LABEL, *LABELLING_REQUESTS
)  # fmt: skip

_IO = "sglang.srt.managers.io_struct"
_REQUESTS = (
    Symbol(places=(f"{_IO}:ReleaseMemoryOccupationReqInput.tags",), why="whose memory"),
    Symbol(
        places=(f"{_IO}:UpdateWeightFromDiskReqInput.weight_version",),
        until="0.5.19",
        why="the weights' label",
    ),
    Symbol(
        places=(f"{_IO}:UpdateWeightFromDiskReqOutput.success",),
        until="0.5.19",
        why="whether the weights have that label",
    ),
)

_LOADING = (
    Symbol(
        places=("sglang.srt.plugins:GENERAL_PLUGINS_GROUP",),
        value="sglang.srt.plugins",
        why="the entry-point group that our package names",
    ),
    Symbol(
        places=("sglang.srt.managers.scheduler:run_scheduler_process",),
        calls="load_plugins",
        why="each scheduler process loads us before it makes its model runner",
    ),
    Symbol(
        places=("sglang.srt.plugins.hook_registry:HookRegistry.register",),
        parameters=("target", "hook", "hook_type"),
        why="how our hooks get there",
    ),
    *(
        Symbol(places=(f"sglang.srt.plugins.hook_registry:HookType.{kind}",), why="their kind")
        for kind in ("BEFORE", "AFTER")
    ),
    Symbol(places=(f"{_RUNNER}.load_model",), why="hooked: arms the loaded model"),
    Symbol(
        places=(f"{_BATCH}.init_new",),
        parameters=("batch", "model_runner"),
        why="hooked: keeps the prompts' lengths",
    ),
    Symbol(
        places=("sglang.version:__version__", "sglang._version:__version__"),
        why="stated in READY.json",
    ),
)

_RUNNER_AND_MODEL = (
    Symbol(places=(f"{_RUNNER}.server_args",), why="the settings"),
    Symbol(places=(f"{_RUNNER}.model_config",), why="shapes and dtype"),
    Symbol(places=(f"{_RUNNER}.model",), why="the model to arm"),
    Symbol(places=(f"{_RUNNER}.is_draft_worker",), why="drafters are left alone"),
    Symbol(places=(f"{_MODEL_CONFIG}.hf_text_config",), why="layers and hidden size"),
    Symbol(places=(f"{_MODEL_CONFIG}.hf_config",), why="the digest of a model without a folder"),
    Symbol(places=(f"{_MODEL_CONFIG}.dtype",), why="the dtype of the states"),
    Symbol(places=(f"{_MODEL_CONFIG}.vocab_size",), why="stated in READY.json"),
    Symbol(places=(f"{_MODEL_CONFIG}.quantization",), why="stated in READY.json"),
    *(
        Symbol(places=(f"sglang.srt.lora.lora_registry:LoRARef.{name}",), why="which adapters")
        for name in ("lora_name", "lora_path")
    ),
    Symbol(places=(f"{_MODEL_CONFIG}.context_len",), why="may change rotary embeddings"),
    Symbol(
        places=(
            f"{_PARALLEL}.attn_tp_rank",
            f"{_PARALLEL_FIELDS}.attn_tp_rank",
            f"{_DP_ATTENTION}:get_attention_tp_rank",
        ),
        why="which rank writes",
    ),
    Symbol(
        places=(
            f"{_PARALLEL}.attn_dp_rank",
            f"{_PARALLEL_FIELDS}.attn_dp_rank",
            f"{_DP_ATTENTION}:get_attention_dp_rank",
        ),
        why="which attention group a rank is of",
    ),
    Symbol(places=(f"{_CONTEXT}:get_parallel",), since="0.5.14", why="the ranks of this process"),
    Symbol(
        places=(f"{_RUNNER}.dp_rank", f"{_RUNNER}.ps", f"{_PARALLEL_FIELDS}.dp_rank"),
        since="0.5.12",  # before, it is not stored: the first free number is taken
        why="which replica a process is of",
    ),
    *(
        Symbol(
            places=(f"sglang.srt.distributed.parallel_state:{name}",),
            why="which ranks share a model",
        )
        for name in ("get_tp_group", "GroupCoordinator.rank", "GroupCoordinator.ranks")
    ),
    Symbol(
        places=(f"{_RUNNER}.startup_weight_load",),
        since="0.5.18",
        why="weights that come after load_model",
    ),
    Symbol(
        places=("sglang.srt.layers.layer_boundary",),
        since="0.5.21",
        why="engines with it can capture before the first layer",
    ),
)

_FORWARD = (
    *(
        Symbol(places=(f"{_BATCH}.{name}",), why=why)
        for name, why in (
            ("forward_mode", "distinguishes prefill from decode"),
            ("_original_forward_mode", "distinguishes batches that are relabelled as prefill"),
            ("rids", "whose rows they are"),
            ("input_ids", "the token of each row"),
            ("extend_seq_lens_cpu", "rows of each request"),
            ("extend_prefix_lens_cpu", "tokens before them"),
            ("is_extend_in_batch", "does any data-parallel rank prefill"),
        )
    ),
    Symbol(
        places=(
            f"{_BATCH}.num_token_non_padded_cpu",
            f"{_BATCH}.global_num_token_non_padded_cpu",
        ),
        why="rows before padding",
    ),
    *(Symbol(places=(f"{_MODE}.{name}",), why="a prefill") for name in ("EXTEND", "MIXED")),
    *(Symbol(places=(f"{_MODE}.{name}",), why="not a prefill") for name in ("DECODE", "IDLE")),
    Symbol(
        places=(f"{_SCHEDULE}:ScheduleBatch.reqs", f"{_SCHEDULE}:ModelWorkerBatch.reqs"),
        why="the requests of a batch",
    ),
    Symbol(places=(f"{_SCHEDULE}:Req.origin_input_ids",), why="the length of a prompt"),
)


def _setting(name: str, why: str, *, since: str = RELEASES[0], until: str | None = None) -> Symbol:
    return Symbol(places=(f"{_ARGS}.{name}",), why=why, since=since, until=until)


_SETTINGS = (
    # The record became the user's input; the resolved value is looked up by name.
    Symbol(
        places=(f"{_CONTEXT}:RuntimeContext.config_leaf",),
        parameters=("name",),
        since="0.5.18",
        why="a setting as the engine resolved it",
    ),
    Symbol(places=(f"{_CONTEXT}:get_context",), since="0.5.18", why="the owner of the settings"),
    *(
        _setting(name, "stated in READY.json, or a size of ours")
        for name in (
            "host", "port", "model_path", "tp_size", "dp_size", "chunked_prefill_size",
            "max_prefill_tokens", "disable_radix_cache", "quantization", "kv_cache_dtype",
        )
    ),
    _setting("weight_version", "stated in READY.json"),
    _setting("enable_dp_attention", "ranks share a forward"),
    _setting("attn_dp_size", "attention groups, apart from replicas", since="0.5.22"),
    *(
        _setting(name, "refused")
        for name in (
            "pp_size", "speculative_algorithm", "enable_two_batch_overlap", "enable_pdmux",
            "enable_torch_compile", "dllm_algorithm", "attn_cp_size",
        )
    ),
    _setting("enable_nsa_prefill_context_parallel", "refused", until="0.5.13"),
    _setting("enable_dsa_prefill_context_parallel", "refused", since="0.5.13", until="0.5.20"),
    _setting("enable_prefill_context_parallel", "refused", until="0.5.20"),
    _setting("enable_prefill_cp", "refused", since="0.5.14"),
    _setting("enable_return_aux_hidden_states", "refused", since="0.5.23"),
    _setting("aux_hidden_state_capture", "refused", since="0.5.23"),
    _setting("disable_piecewise_cuda_graph", "prefill graphs are refused", until="0.5.14"),
    _setting("cuda_graph_config", "prefill graphs are refused", since="0.5.14"),
    Symbol(
        places=("sglang.srt.model_executor.cuda_graph_config:CudaGraphConfig.prefill",),
        since="0.5.14",
        why="prefill graphs are refused",
    ),
    Symbol(
        places=("sglang.srt.model_executor.cuda_graph_config:PhaseConfig.backend",),
        since="0.5.14",
        why="prefill graphs are refused",
    ),
    _setting("enable_flashinfer_allreduce_fusion", "sums left to the next layer"),
    _setting("flashinfer_allreduce_fusion_backend", "the same", since="0.5.14"),
    _setting("enable_aiter_allreduce_fusion", "the same"),
    Symbol(
        places=(
            "sglang.srt.layers.communicator:"
            "LayerCommunicator.should_fuse_mlp_allreduce_with_next_layer",
        ),
        until="0.5.21",
        why="layers that may leave their sum to the next one",
    ),
    Symbol(
        places=("sglang.srt.models.gpt_oss:GptOssDecoderLayer.layer_communicator",),
        until="0.5.21",
        why="the owner of that",
    ),
    _setting("skip_server_warmup", "refused where the warm-up is the proof"),
)  # fmt: skip

#: Settings that may change the states; READY.json records their resolved values. Sampling settings
#: are not among them.
NUMERIC_SETTINGS: Final = (
    # stored or computed in fewer bits
    _setting("quantization", "weights in fewer bits"),
    _setting("quantization_param_path", "scales of the KV cache"),
    _setting("torchao_config", "weights in fewer bits", until="0.5.18"),
    _setting("modelopt_quant", "weights in fewer bits"),
    _setting("quantize_and_serve", "weights in fewer bits"),
    _setting("rl_quant_profile", "weights in fewer bits"),
    _setting("kv_cache_dtype", "keys and values in fewer bits"),
    _setting("prefill_kv_cache_dequant_dtype", "keys and values in fewer bits", since="0.5.21"),
    _setting("qsa_indexer_dtype", "the indexer's keys in fewer bits", since="0.5.22"),
    _setting("enable_deepseek_v4_fp4_indexer", "the indexer's keys in fewer bits", since="0.5.13"),
    _setting("mamba_ssm_dtype", "recurrent states in fewer bits"),
    _setting(
        "enable_mamba_cache_stochastic_rounding",
        "recurrent states rounded at random",
        since="0.5.15",
    ),
    _setting("enable_int8_mamba_checkpoint", "recurrent states in fewer bits", since="0.5.14"),
    _setting("deepep_dispatcher_output_dtype", "rows to experts in fewer bits", since="0.5.13"),
    _setting("flashinfer_mxfp4_moe_precision", "experts in fewer bits"),
    _setting("enable_w4a4_mxfp4_megamoe", "experts in fewer bits", since="0.5.19"),
    _setting("enable_quant_communications", "sums over ranks in fewer bits"),
    _setting("enable_tf32_matmul", "products of float32 in fewer bits", since="0.5.15"),
    _setting("enable_fp32_lm_head", "logits in more bits"),
    _setting("triton_attention_reduce_in_fp32", "sums of attention in more bits"),
    # another computation
    _setting("load_format", "where the weights come from"),
    _setting("model_impl", "the engine's model class or transformers'"),
    _setting("json_model_override_args", "any part of the config"),
    _setting("enable_multimodal", "the model class"),
    _setting("language_model_only", "the model class", since="0.5.18"),
    _setting("language_only", "the model class"),
    _setting("encoder_only", "the model class"),
    _setting("forward_hooks", "the user's own code in the model"),
    _setting("enable_lora", "layers with adapters"),
    _setting("lora_paths", "which adapters"),
    _setting("lora_target_modules", "where adapters act"),
    _setting("max_lora_rank", "the size of adapters"),
    _setting("enable_hisparse", "keys that attention leaves out"),
    _setting("hisparse_config", "keys that attention leaves out"),
    _setting(
        "enable_encoder_swa_bounded_replay",
        "rows computed again from a part of their prefix",
        since="0.5.21",
    ),
    _setting(
        "enable_decoder_swa_bounded_replay",
        "rows computed again from a part of their prefix",
        since="0.5.21",
    ),
    _setting("kt_weight_path", "weights of experts on the CPU"),
    _setting("kt_method", "experts on the CPU in fewer bits"),
    _setting("kt_num_gpu_experts", "which experts are on the CPU"),
    _setting("kt_max_deferred_experts_per_token", "experts that act a layer late"),
    _setting("enable_precise_embedding_interpolation", "positions in an image"),
    # other kernels for the same computation
    _setting("attention_backend", "kernels"),
    _setting("prefill_attention_backend", "kernels"),
    _setting("decode_attention_backend", "kernels"),
    _setting("mm_attention_backend", "kernels"),
    _setting("linear_attn_backend", "kernels"),
    _setting("linear_attn_prefill_backend", "kernels"),
    _setting("linear_attn_decode_backend", "kernels"),
    _setting("enable_linear_replayssm", "kernels", since="0.5.15"),
    _setting("mamba_backend", "kernels"),
    _setting("nsa_prefill_backend", "kernels", until="0.5.13"),
    _setting("nsa_decode_backend", "kernels", until="0.5.13"),
    _setting("dsa_prefill_backend", "kernels", since="0.5.13"),
    _setting("dsa_decode_backend", "kernels", since="0.5.13"),
    _setting("dsa_paged_mqa_logits_backend", "kernels", since="0.5.15"),
    _setting("dsa_topk_backend", "kernels", since="0.5.13"),
    _setting("dsa_triton_union", "kernels", since="0.5.22"),
    _setting("enable_dsa_fused_indexer", "kernels", since="0.5.22"),
    _setting("dsv4_prefill_backend", "kernels", since="0.5.19"),
    _setting("dsv4_attn_backend", "kernels", since="0.5.20"),
    _setting("enable_lean_attention", "kernels", since="0.5.19"),
    _setting("enable_nvidia_megakernel", "kernels", since="0.5.23"),
    _setting("enable_amd_monokernel", "kernels", since="0.5.23"),
    _setting("enable_fused_qk_norm_rope", "kernels"),
    _setting("flashinfer_mla_disable_ragged", "kernels"),
    _setting("disable_chunked_prefix_cache", "kernels"),
    _setting("triton_attention_num_kv_splits", "the order of sums"),
    _setting("triton_attention_split_tile_size", "the order of sums"),
    _setting("page_size", "the order of sums"),
    _setting("fp8_gemm_runner_backend", "kernels"),
    _setting("fp4_gemm_runner_backend", "kernels"),
    _setting("bf16_gemm_backend", "kernels", since="0.5.15"),
    _setting("moe_runner_backend", "kernels"),
    _setting("moe_a2a_backend", "kernels"),
    _setting("lora_backend", "kernels"),
    _setting("deepep_mode", "kernels"),
    _setting("fuseep_mode", "kernels", since="0.5.16"),
    _setting("disable_shared_experts_fusion", "kernels"),
    _setting("enforce_shared_experts_fusion", "kernels"),
    _setting("enable_fused_moe_sum_all_reduce", "the order of sums"),
    _setting("disable_flashinfer_autotune", "kernels"),
    _setting("enable_deterministic_inference", "kernels whose sums do not depend on the batch"),
    _setting("rl_on_policy_target", "kernels of a trainer"),
    _setting("enable_mixed_chunk", "which rows share a forward"),
    _setting("enable_single_batch_overlap", "kernels"),
    # how the model is spread
    _setting("tp_size", "the order of sums"),
    _setting("dp_size", "which rows share a forward"),
    _setting("attn_dp_size", "which rows share a forward", since="0.5.22"),
    _setting("ep_size", "the order of sums"),
    _setting("moe_dp_size", "the order of sums"),
    _setting("moe_dense_tp_size", "the order of sums"),
    _setting("dcp_size", "the order of sums", since="0.5.15"),
    _setting("dwdp_size", "the order of sums", since="0.5.17"),
    _setting("enable_dp_attention", "the order of sums"),
    _setting("enable_dp_lm_head", "the order of sums"),
    _setting("enable_attn_tp_input_scattered", "the order of sums"),
    _setting("enable_shared_experts_attn_tp", "the order of sums", since="0.5.19"),
    _setting("shared_experts_tp_size", "the order of sums", since="0.5.21"),
    _setting("enable_dense_mlp_attn_tp", "the order of sums", since="0.5.19"),
    _setting("enable_layernorm_sp", "the order of sums", since="0.5.19"),
    _setting("ep_num_redundant_experts", "the order of sums"),
    _setting("ep_dispatch_algorithm", "the order of sums"),
    _setting("init_expert_location", "the order of sums"),
    _setting("enable_eplb", "the order of sums"),
    _setting("disable_custom_all_reduce", "the order of sums"),
    _setting("boundary_reduction", "the order of sums", since="0.5.21"),
    _setting("enable_mscclpp", "the order of sums"),
    _setting("enable_torch_symm_mem", "the order of sums"),
    _setting("enable_symm_mem", "the order of sums"),
    _setting("enable_nccl_nvls", "the order of sums"),
    _setting("enable_flashinfer_allreduce_fusion", "the order of sums"),
    _setting("flashinfer_allreduce_fusion_backend", "the order of sums", since="0.5.14"),
    _setting("enable_aiter_allreduce_fusion", "the order of sums"),
)  # fmt: skip

TARGETS: Final[tuple[Symbol, ...]] = (
    *_LOADING, *_RUNNER_AND_MODEL, *HOOKED, *_REQUESTS, *_FORWARD, *_SETTINGS,
    *NUMERIC_SETTINGS,
)  # fmt: skip

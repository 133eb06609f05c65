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
_STATE = "sglang.srt.distributed.parallel_state"
_ADAPTER = "sglang.srt.lora.lora_registry:LoRARef"
_GRAPHS = "sglang.srt.model_executor.cuda_graph_config"
_DP_ATTENTION = "sglang.srt.layers.dp_attention"
_REGISTRY = "sglang.srt.plugins.hook_registry"
_SCHEDULE = "sglang.srt.managers.schedule_batch"

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater:WeightUpdater"
_UPDATE_REQUESTS = (
    "sglang.srt.managers.scheduler_update_weights_mixin:SchedulerUpdateWeightsMixin",
    "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager",
)


def _symbols(
    why: str, *places: str, since: str = RELEASES[0], until: str | None = None
) -> tuple[Symbol, ...]:
    """One symbol for each of `places`."""
    return tuple(Symbol(places=(place,), why=why, since=since, until=until) for place in places)


def _settings(
    why: str, *names: str, since: str = RELEASES[0], until: str | None = None
) -> tuple[Symbol, ...]:
    """Fields of `ServerArgs`."""
    return _symbols(why, *(f"{_ARGS}.{name}" for name in names), since=since, until=until)


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
    *_symbols(
        "hooked: new weights",
        f"{_UPDATER}.load_weights_from_distributed", f"{_UPDATER}.begin_weight_update",
        f"{_UPDATER}.end_weight_update", since="0.5.21",
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
    *_symbols("whose memory", f"{_IO}:ReleaseMemoryOccupationReqInput.tags"),
    *_symbols(
        "the weights' label", f"{_IO}:UpdateWeightFromDiskReqInput.weight_version", until="0.5.19"
    ),
    *_symbols(
        "whether the weights have that label", f"{_IO}:UpdateWeightFromDiskReqOutput.success",
        until="0.5.19",
    ),
)  # fmt: skip

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
        places=(f"{_REGISTRY}:HookRegistry.register",),
        parameters=("target", "hook", "hook_type"),
        why="how our hooks get there",
    ),
    *_symbols("their kind", f"{_REGISTRY}:HookType.BEFORE", f"{_REGISTRY}:HookType.AFTER"),
    *_symbols("hooked: arms the loaded model", f"{_RUNNER}.load_model"),
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
    *_symbols("the settings", f"{_RUNNER}.server_args"),
    *_symbols("shapes and dtype", f"{_RUNNER}.model_config"),
    *_symbols("the model to arm", f"{_RUNNER}.model"),
    *_symbols("drafters are left alone", f"{_RUNNER}.is_draft_worker"),
    *_symbols("layers and hidden size", f"{_MODEL_CONFIG}.hf_text_config"),
    *_symbols("the digest of a model without a folder", f"{_MODEL_CONFIG}.hf_config"),
    *_symbols("the dtype of the states", f"{_MODEL_CONFIG}.dtype"),
    *_symbols(
        "stated in READY.json", f"{_MODEL_CONFIG}.vocab_size", f"{_MODEL_CONFIG}.quantization"
    ),
    *_symbols("which adapters", f"{_ADAPTER}.lora_name", f"{_ADAPTER}.lora_path"),
    *_symbols("may change rotary embeddings", f"{_MODEL_CONFIG}.context_len"),
    Symbol(
        places=(
            f"{_PARALLEL}.attn_tp_rank", f"{_PARALLEL_FIELDS}.attn_tp_rank",
            f"{_DP_ATTENTION}:get_attention_tp_rank",
        ),
        why="which rank writes",
    ),
    Symbol(
        places=(
            f"{_PARALLEL}.attn_dp_rank", f"{_PARALLEL_FIELDS}.attn_dp_rank",
            f"{_DP_ATTENTION}:get_attention_dp_rank",
        ),
        why="which attention group a rank is of",
    ),
    *_symbols("the ranks of this process", f"{_CONTEXT}:get_parallel", since="0.5.14"),
    Symbol(
        places=(f"{_RUNNER}.dp_rank", f"{_RUNNER}.ps", f"{_PARALLEL_FIELDS}.dp_rank"),
        since="0.5.12",  # before, it is not stored: the first free number is taken
        why="which replica a process is of",
    ),
    *_symbols(
        "which ranks share a model",
        f"{_STATE}:get_tp_group", f"{_STATE}:GroupCoordinator.rank",
        f"{_STATE}:GroupCoordinator.ranks",
    ),
    *_symbols("weights after load_model", f"{_RUNNER}.startup_weight_load", since="0.5.18"),
    *_symbols(
        "engines with it can capture before the first layer", "sglang.srt.layers.layer_boundary",
        since="0.5.21",
    ),
)  # fmt: skip

_FORWARD = (
    *_symbols("distinguishes prefill from decode", f"{_BATCH}.forward_mode"),
    *_symbols(
        "distinguishes batches that are relabelled as prefill", f"{_BATCH}._original_forward_mode"
    ),
    *_symbols("whose rows they are", f"{_BATCH}.rids"),
    *_symbols("the token of each row", f"{_BATCH}.input_ids"),
    *_symbols("rows of each request", f"{_BATCH}.extend_seq_lens_cpu"),
    *_symbols("tokens before them", f"{_BATCH}.extend_prefix_lens_cpu"),
    *_symbols("does any data-parallel rank prefill", f"{_BATCH}.is_extend_in_batch"),
    Symbol(
        places=(
            f"{_BATCH}.num_token_non_padded_cpu", f"{_BATCH}.global_num_token_non_padded_cpu",
        ),
        why="rows before padding",
    ),
    *_symbols("a prefill", f"{_MODE}.EXTEND", f"{_MODE}.MIXED"),
    *_symbols("not a prefill", f"{_MODE}.DECODE", f"{_MODE}.IDLE"),
    Symbol(
        places=(f"{_SCHEDULE}:ScheduleBatch.reqs", f"{_SCHEDULE}:ModelWorkerBatch.reqs"),
        why="the requests of a batch",
    ),
    *_symbols("the length of a prompt", f"{_SCHEDULE}:Req.origin_input_ids"),
)  # fmt: skip

_SETTINGS = (
    # The record became the user's input; the resolved value is looked up by name.
    Symbol(
        places=(f"{_CONTEXT}:RuntimeContext.config_leaf",),
        parameters=("name",),
        since="0.5.18",
        why="a setting as the engine resolved it",
    ),
    *_symbols("the owner of the settings", f"{_CONTEXT}:get_context", since="0.5.18"),
    *_settings(
        "stated in READY.json, or a size of ours",
        "host", "port", "model_path", "tp_size", "dp_size", "chunked_prefill_size",
        "max_prefill_tokens", "disable_radix_cache", "quantization", "kv_cache_dtype",
    ),
    *_settings("stated in READY.json", "weight_version"),
    *_settings("ranks share a forward", "enable_dp_attention"),
    *_settings("attention groups, apart from replicas", "attn_dp_size", since="0.5.22"),
    *_settings(
        "refused",
        "pp_size", "speculative_algorithm", "enable_two_batch_overlap", "enable_pdmux",
        "enable_torch_compile", "dllm_algorithm", "attn_cp_size",
    ),
    *_settings("refused", "enable_nsa_prefill_context_parallel", until="0.5.13"),
    *_settings("refused", "enable_dsa_prefill_context_parallel", since="0.5.13", until="0.5.20"),
    *_settings("refused", "enable_prefill_context_parallel", until="0.5.20"),
    *_settings("refused", "enable_prefill_cp", since="0.5.14"),
    *_settings(
        "refused", "enable_return_aux_hidden_states", "aux_hidden_state_capture", since="0.5.23"
    ),
    *_settings("prefill graphs are refused", "disable_piecewise_cuda_graph", until="0.5.14"),
    *_settings("prefill graphs are refused", "cuda_graph_config", since="0.5.14"),
    *_symbols(
        "prefill graphs are refused",
        f"{_GRAPHS}:CudaGraphConfig.prefill", f"{_GRAPHS}:PhaseConfig.backend", since="0.5.14",
    ),
    *_settings(
        "sums left to the next layer",
        "enable_flashinfer_allreduce_fusion", "enable_aiter_allreduce_fusion",
    ),
    *_settings(
        "sums left to the next layer", "flashinfer_allreduce_fusion_backend", since="0.5.14"
    ),
    *_symbols(
        "layers that may leave their sum to the next one",
        "sglang.srt.layers.communicator:"
        "LayerCommunicator.should_fuse_mlp_allreduce_with_next_layer",
        "sglang.srt.models.gpt_oss:GptOssDecoderLayer.layer_communicator", until="0.5.21",
    ),
    *_settings("refused where the warm-up is the proof", "skip_server_warmup"),
)  # fmt: skip

#: Settings that may change the states; READY.json records their resolved values. Sampling settings
#: are not among them.
NUMERIC_SETTINGS: Final = (
    # stored or computed in fewer bits
    *_settings(
        "weights in fewer bits",
        "quantization", "modelopt_quant", "quantize_and_serve", "rl_quant_profile",
    ),
    *_settings("weights in fewer bits", "torchao_config", until="0.5.18"),
    *_settings("scales of the KV cache", "quantization_param_path"),
    *_settings("keys and values in fewer bits", "kv_cache_dtype"),
    *_settings("keys and values in fewer bits", "prefill_kv_cache_dequant_dtype", since="0.5.21"),
    *_settings(
        "the indexer's keys in fewer bits",
        "enable_deepseek_v4_fp4_indexer", since="0.5.13",
    ),
    *_settings("the indexer's keys in fewer bits", "qsa_indexer_dtype", since="0.5.22"),
    *_settings("recurrent states in fewer bits", "mamba_ssm_dtype"),
    *_settings("recurrent states in fewer bits", "enable_int8_mamba_checkpoint", since="0.5.14"),
    *_settings(
        "recurrent states rounded at random",
        "enable_mamba_cache_stochastic_rounding", since="0.5.15",
    ),
    *_settings("rows to experts in fewer bits", "deepep_dispatcher_output_dtype", since="0.5.13"),
    *_settings("experts in fewer bits", "flashinfer_mxfp4_moe_precision"),
    *_settings("experts in fewer bits", "enable_w4a4_mxfp4_megamoe", since="0.5.19"),
    *_settings("sums over ranks in fewer bits", "enable_quant_communications"),
    *_settings("products of float32 in fewer bits", "enable_tf32_matmul", since="0.5.15"),
    *_settings("logits in more bits", "enable_fp32_lm_head"),
    *_settings("sums of attention in more bits", "triton_attention_reduce_in_fp32"),
    # another computation
    *_settings("where the weights come from", "load_format"),
    *_settings("the engine's model class or transformers'", "model_impl"),
    *_settings("any part of the config", "json_model_override_args"),
    *_settings("the model class", "enable_multimodal", "language_only", "encoder_only"),
    *_settings("the model class", "language_model_only", since="0.5.18"),
    *_settings("the user's own code in the model", "forward_hooks"),
    *_settings("layers with adapters", "enable_lora"),
    *_settings("which adapters", "lora_paths"),
    *_settings("where adapters act", "lora_target_modules"),
    *_settings("the size of adapters", "max_lora_rank"),
    *_settings("keys that attention leaves out", "enable_hisparse", "hisparse_config"),
    *_settings(
        "rows computed again from a part of their prefix",
        "enable_encoder_swa_bounded_replay", "enable_decoder_swa_bounded_replay", since="0.5.21",
    ),
    *_settings("weights of experts on the CPU", "kt_weight_path"),
    *_settings("experts on the CPU in fewer bits", "kt_method"),
    *_settings("which experts are on the CPU", "kt_num_gpu_experts"),
    *_settings("experts that act a layer late", "kt_max_deferred_experts_per_token"),
    *_settings("positions in an image", "enable_precise_embedding_interpolation"),
    # other kernels for the same computation
    *_settings(
        "kernels",
        "attention_backend", "prefill_attention_backend", "decode_attention_backend",
        "mm_attention_backend", "linear_attn_backend", "linear_attn_prefill_backend",
        "linear_attn_decode_backend", "mamba_backend", "enable_fused_qk_norm_rope",
        "flashinfer_mla_disable_ragged", "disable_chunked_prefix_cache", "fp8_gemm_runner_backend",
        "fp4_gemm_runner_backend", "moe_runner_backend", "moe_a2a_backend", "lora_backend",
        "deepep_mode", "disable_shared_experts_fusion", "enforce_shared_experts_fusion",
        "disable_flashinfer_autotune", "enable_single_batch_overlap",
    ),
    *_settings("kernels", "nsa_prefill_backend", "nsa_decode_backend", until="0.5.13"),
    *_settings(
        "kernels",
        "dsa_prefill_backend", "dsa_decode_backend", "dsa_topk_backend", since="0.5.13",
    ),
    *_settings(
        "kernels",
        "enable_linear_replayssm", "dsa_paged_mqa_logits_backend", "bf16_gemm_backend",
        since="0.5.15",
    ),
    *_settings("kernels", "fuseep_mode", since="0.5.16"),
    *_settings("kernels", "dsv4_prefill_backend", "enable_lean_attention", since="0.5.19"),
    *_settings("kernels", "dsv4_attn_backend", since="0.5.20"),
    *_settings("kernels", "dsa_triton_union", "enable_dsa_fused_indexer", since="0.5.22"),
    *_settings("kernels", "enable_nvidia_megakernel", "enable_amd_monokernel", since="0.5.23"),
    *_settings(
        "the order of sums",
        "triton_attention_num_kv_splits", "triton_attention_split_tile_size", "page_size",
        "enable_fused_moe_sum_all_reduce",
    ),
    *_settings("kernels whose sums do not depend on the batch", "enable_deterministic_inference"),
    *_settings("kernels of a trainer", "rl_on_policy_target"),
    *_settings("which rows share a forward", "enable_mixed_chunk"),
    # how the model is spread
    *_settings(
        "the order of sums",
        "tp_size", "ep_size", "moe_dp_size", "moe_dense_tp_size", "enable_dp_attention",
        "enable_dp_lm_head", "enable_attn_tp_input_scattered", "ep_num_redundant_experts",
        "ep_dispatch_algorithm", "init_expert_location", "enable_eplb", "disable_custom_all_reduce",
        "enable_mscclpp", "enable_torch_symm_mem", "enable_symm_mem", "enable_nccl_nvls",
        "enable_flashinfer_allreduce_fusion", "enable_aiter_allreduce_fusion",
    ),
    *_settings("the order of sums", "flashinfer_allreduce_fusion_backend", since="0.5.14"),
    *_settings("the order of sums", "dcp_size", since="0.5.15"),
    *_settings("the order of sums", "dwdp_size", since="0.5.17"),
    *_settings(
        "the order of sums",
        "enable_shared_experts_attn_tp", "enable_dense_mlp_attn_tp", "enable_layernorm_sp",
        since="0.5.19",
    ),
    *_settings("the order of sums", "shared_experts_tp_size", "boundary_reduction", since="0.5.21"),
    *_settings("which rows share a forward", "dp_size"),
    *_settings("which rows share a forward", "attn_dp_size", since="0.5.22"),
)  # fmt: skip

TARGETS: Final[tuple[Symbol, ...]] = (
    *_LOADING, *_RUNNER_AND_MODEL, *HOOKED, *_REQUESTS, *_FORWARD, *_SETTINGS,
    *NUMERIC_SETTINGS,
)  # fmt: skip

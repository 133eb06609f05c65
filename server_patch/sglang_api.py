"""Reads every attribute of SGLang that the plugin uses, one look-up per fact.

SGLang moves things between releases; only this module follows. The names that it looks up are
listed in `sglang_compat`, which the tests compare with the wheels of all supported releases. A
look-up that fails raises EngineError with the name of what moved. Nothing of sglang is imported
before a look-up is made.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import json
import logging
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

import torch

from server_patch import sglang_compat
from server_patch.dump_format import EngineInfo, ModelInfo
from server_patch.weights import Ranks

logger = logging.getLogger(__name__)

#: Hook targets. The second only refines the first (see `note_prompt_lengths`).
LOAD_MODEL: Final = sglang_compat.LOAD_MODEL
INIT_FORWARD_BATCH: Final = sglang_compat.INIT_FORWARD_BATCH

_STATE_DTYPES: Final = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


class EngineError(RuntimeError):
    """This SGLang lacks something that the plugin needs; the message names it."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The place of this process among all that serve the model."""

    rank: int | None  # data-parallel rank; None where the engine does not say
    is_writer: bool  # attention-tensor-parallel rank 0
    shares_forward: bool  # data-parallel groups run one forward together (DP attention)


@dataclass(frozen=True, kw_only=True)
class RunnerFacts:
    """The facts about a loaded model runner."""

    model: ModelInfo
    engine: EngineInfo
    placement: Placement
    device: torch.device  # where the states are
    max_forward_rows: int  # tokens one prefill forward may hold
    host: str  # the address and port that the server was configured to listen on
    port: int
    weight_version: str | None  # the engine's label for the weights


def read_facts(runner: Any, *, architecture: str) -> RunnerFacts:
    """Read the facts of a `ModelRunner` whose model is loaded. Raises EngineError.

    architecture: class name of the causal LM.
    """
    settings = EngineSettings(_get(runner, "server_args"))
    groups, replicas = _data_parallel_sizes(settings)
    chunk = int(settings.get("chunked_prefill_size") or -1)
    whole = int(settings.get("max_prefill_tokens") or 16384)
    return RunnerFacts(
        model=_model_info(runner, settings, architecture=architecture),
        engine=EngineInfo(
            version=version(),
            tp_size=int(settings.need("tp_size")),
            dp_size=groups * replicas,
            chunked_prefill_size=chunk if chunk > 0 else -1,
            radix_cache=not settings.need("disable_radix_cache"),
            kv_cache_dtype=_text_or_none(settings.get("kv_cache_dtype")),
            settings=numeric_settings(runner),
        ),
        placement=Placement(
            rank=_data_parallel_rank(runner, groups=groups, replicas=replicas),
            is_writer=_attention_tp_rank() == 0,
            shares_forward=groups > 1,
        ),
        device=next(_get(runner, "model").parameters()).device,
        max_forward_rows=chunk if chunk > 0 else whole,
        host=str(settings.need("host")),
        port=int(settings.need("port")),
        weight_version=_text_or_none(settings.get("weight_version")),
    )


def _model_info(runner: Any, settings: EngineSettings, *, architecture: str) -> ModelInfo:
    config = _get(runner, "model_config")
    text_config = _get(config, "hf_text_config", "hf_config")
    dtype = _get(config, "dtype")
    if dtype not in _STATE_DTYPES:
        raise EngineError(f"the model runs in {dtype}, not in bfloat16, float16 or float32")
    return ModelInfo(
        path=str(settings.need("model_path")),
        architecture=architecture,
        config_digest=config_digest(runner),
        vocab_size=int(_get(config, "vocab_size")),
        num_layers=int(_get(text_config, "num_hidden_layers")),
        hidden_size=int(_get(text_config, "hidden_size")),
        dtype=_STATE_DTYPES[dtype],
        # The model's own config decides when no argument does.
        quantization=_text_or_none(
            getattr(config, "quantization", None) or settings.get("quantization")
        ),
    )


#: Fields of a text config that determine the rotary embeddings.
_ROPE: Final = (
    "rope_theta", "rope_scaling", "rope_parameters", "rope_type", "rope_local_base_freq",
    "partial_rotary_factor", "max_position_embeddings", "original_max_position_embeddings",
)  # fmt: skip
#: Fields of any config that describe its origin only.
_VOLATILE: Final = ("_name_or_path", "_commit_hash", "transformers_version")
#: Values that mean that a setting is off or at its default.
_OFF: Final = ("", "0", "auto", "default", "none", "trivial", "{}", "[]")
_MAX_SETTING_CHARS: Final = 300


def numeric_settings(runner: Any) -> dict[str, str]:
    """The settings that may change the states of a prompt, as the engine resolved them.

    Name -> value. EngineSettings that are off, unset or unknown to the release are left out.
    """
    settings = EngineSettings(_get(runner, "server_args"))
    config = _get(runner, "model_config")
    device = next(_get(runner, "model").parameters()).device
    on_gpu = device.type == "cuda"
    values: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "torch": torch.__version__,
        "transformers": getattr(sys.modules.get("transformers"), "__version__", None),
        "context_length": getattr(config, "context_len", None),
        "rope": _rope(getattr(config, "hf_text_config", None)),
        "model_config": _digest_of(getattr(config, "hf_config", None)),
    }
    for target in sglang_compat.NUMERIC_SETTINGS:
        name = target.places[0].rpartition(".")[2]
        values[name] = settings.get(name)
    if not values.get("kt_weight_path"):
        values["kt_method"] = None  # set even if all experts are on the GPU
    # The model's own config decides when no argument does.
    values["quantization"] = getattr(config, "quantization", None) or values["quantization"]
    texts = {name: _setting_text(value) for name, value in values.items()}
    return {
        name: text
        for name, text in texts.items()
        if text not in _OFF and not (name.endswith("_size") and text == "1")
    }


def _rope(config: Any) -> dict[str, Any]:
    found = {name: getattr(config, name, None) for name in _ROPE}
    return {name: value for name, value in found.items() if value is not None}


def _digest_of(config: Any) -> str | None:
    """Digest of a Hugging Face config, with overrides and the defaults that transformers adds."""
    if config is None:
        return None
    return hashlib.sha256(_canonical(config.to_dict()).encode()).hexdigest()[:32]


def _setting_text(value: Any) -> str:
    if value is None or value is False:
        return ""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, bool | int | float | str):
        text = str(value).lower() if isinstance(value, bool) else str(value)
    else:
        text = _canonical(value)
    if len(text) <= _MAX_SETTING_CHARS:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    return f"{text[: _MAX_SETTING_CHARS - 50]}... sha256:{digest}"


def _canonical(value: Any) -> str:
    """Serialise to JSON that is identical for equal values in every process."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items() if k not in _VOLATILE}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "lora_path"):  # leave out the random id that the engine gives each adapter
        return f"{getattr(value, 'lora_name', None)}={value.lora_path}"
    return str(value) if isinstance(value, torch.dtype | Enum) else type(value).__name__


def is_draft(runner: Any) -> bool:
    """Whether this is the runner of a speculative drafter."""
    return bool(_get(runner, "is_draft_worker"))


def tensor_parallel_ranks(runner: Any) -> Ranks:
    """The ranks that share the model of `runner`. Raises EngineError."""
    if int(EngineSettings(_get(runner, "server_args")).need("tp_size")) == 1:
        return Ranks(rank=0, ranks=[0], store=None)
    module = importlib.import_module("sglang.srt.distributed.parallel_state")
    group = _get(module, "get_tp_group")()
    # The key-value store of the rendezvous at start, hosted by one of the processes.
    store = torch.distributed.distributed_c10d._get_default_store()
    return Ranks(rank=int(_get(group, "rank")), ranks=list(_get(group, "ranks")), store=store)


def loads_weights_later(runner: Any) -> bool:
    """Whether `load_model` leaves loading the weights to `finalize_startup_weight_load`."""
    return getattr(runner, "startup_weight_load", None) is not None


def refusals(runner: Any) -> list[str]:
    """Settings of the server under which rows would be missing or wrong, each with the way out."""
    settings = EngineSettings(_get(runner, "server_args"))
    setting = settings.get
    reasons = []
    if int(setting("pp_size", 1) or 1) > 1:
        reasons.append(
            "pipeline parallel splits the layers over processes: use --pp-size 1 and more tensor "
            "parallel"
        )
    if setting("speculative_algorithm"):
        reasons.append("a speculative drafter is configured: drop --speculative-algorithm")
    if setting("enable_two_batch_overlap"):
        reasons.append("two-batch overlap captures nothing: drop --enable-two-batch-overlap")
    if setting("enable_pdmux"):
        reasons.append("PD multiplexing runs prefill past the model's forward: drop --enable-pdmux")
    if setting("enable_torch_compile"):
        reasons.append("torch.compile replays no Python: drop --enable-torch-compile")
    if setting("dllm_algorithm"):
        reasons.append("diffusion language models recompute their rows: drop --dllm-algorithm")
    if int(setting("attn_cp_size", 1) or 1) > 1 or any(
        setting(name)
        for name in (
            "enable_prefill_cp",
            "enable_prefill_context_parallel",
            "enable_nsa_prefill_context_parallel",
            "enable_dsa_prefill_context_parallel",
        )
    ):
        reasons.append(
            "context parallel splits and reorders the rows: drop --attn-cp-size and the prefill "
            "context-parallel options"
        )
    if setting("enable_return_aux_hidden_states") or setting("aux_hidden_state_capture"):
        reasons.append(
            "the engine's own aux capture is on, and would be turned off by ours: drop "
            "--enable-return-aux-hidden-states"
        )
    graphs = _prefill_graphs(settings, next(_get(runner, "model").parameters()).device)
    if graphs:
        reasons.append(graphs)
    return reasons


def proof_refusals(runner: Any) -> list[str]:
    """Settings under which `capture_audit` cannot watch a forward, each with the way out."""
    settings = EngineSettings(_get(runner, "server_args"))
    reasons = []
    if settings.get("skip_server_warmup"):
        reasons.append("there is no warm-up to prove it on: drop --skip-server-warmup")
    if _data_parallel_sizes(settings)[0] > 1:
        reasons.append(
            "under DP attention a rank may see no row of the warm-up: drop --enable-dp-attention"
        )
    return reasons


def reduction_refusal(runner: Any, layer: Any) -> str | None:
    """Why the engine's capture in front of `layer` would store sums that are not added up over the
    ranks yet, or None when it would not.

    With fused all-reduce a layer leaves its sum to the next one's norm. Models that capture within
    the layer take it from there; those that capture between two layers take it too early. Newer
    engines know what a layer owes.
    """
    settings = EngineSettings(_get(runner, "server_args"))
    is_fused = (
        settings.get("flashinfer_allreduce_fusion_backend")
        or settings.get("enable_flashinfer_allreduce_fusion")
        or settings.get("enable_aiter_allreduce_fusion")
    )
    communicator = getattr(layer, "layer_communicator", None)
    if (
        int(settings.need("tp_size")) == 1
        or not is_fused
        or not hasattr(communicator, "should_fuse_mlp_allreduce_with_next_layer")
        or "captured_last_layer_outputs" in inspect.signature(layer.forward).parameters
    ):
        return None
    return (
        f"SGLang {version()} captures {type(layer).__name__} before its fused all-reduce: start "
        "the server with --enforce-disable-flashinfer-allreduce-fusion (and without "
        "--enable-aiter-allreduce-fusion)"
    )


def _prefill_graphs(settings: EngineSettings, device: torch.device) -> str | None:
    """Why prefill forwards would be replayed without Python, or None when they would not."""
    if device.type != "cuda":
        return None
    config = settings.get("cuda_graph_config")
    if config is not None:  # 0.5.14 and newer
        backend = getattr(_get(config, "prefill"), "backend", None)
        if str(backend).lower() == "disabled":
            return None
        return (
            f"prefill CUDA graphs ({backend}) replay no Python: start the server with "
            "--cuda-graph-backend-prefill disabled"
        )
    if settings.get("disable_piecewise_cuda_graph") is False:  # before
        return (
            "piecewise CUDA graphs replay no Python: start the server with "
            "--disable-piecewise-cuda-graph"
        )
    return None


def captures_boundary_zero() -> bool:
    """Whether a capture point can be before the first layer.

    Older engines add `hidden_states + residual` there, and the residual is still None: the first
    request would end the server.
    """
    return importlib.util.find_spec("sglang.srt.layers.layer_boundary") is not None


def config_digest(runner: Any) -> str:
    """sha256 of the model's config.json as canonical JSON (sorted keys, no spaces)."""
    config_file = Path(str(_get(_get(runner, "server_args"), "model_path"))) / "config.json"
    try:
        document = json.loads(config_file.read_bytes())
    except (OSError, ValueError):  # a model named by hub id: the file is somewhere in a cache
        document = _get(_get(runner, "model_config"), "hf_config").to_dict()
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def version() -> str:
    return str(importlib.import_module("sglang.version").__version__)


def register_after(target: str, hook: Callable[..., Any]) -> None:
    """Call `hook(result, *args, **kwargs)` after every call of `target` that returns."""
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    registry.HookRegistry.register(target, hook, registry.HookType.AFTER)


def register_before(target: str, hook: Callable[..., None]) -> None:
    """Call `hook(*args, **kwargs)` before every call of `target`."""
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    registry.HookRegistry.register(target, hook, registry.HookType.BEFORE)


def register_weight_hooks(
    *,
    before_update: Callable[[], None],
    after_label: Callable[[str], None],
    after_late_load: Callable[[Any], None],
) -> None:
    """Register hooks on everything that may change the weights in memory or their label.

    `before_update` is called before each possible change, even if that change then fails.
    `after_label` is called with each new label, and `after_late_load` with a runner whose weights
    were loaded after `load_model`. Their exceptions are logged.
    """

    def safely(act: Callable[..., None], *arguments: Any) -> None:
        try:
            act(*arguments)
        except Exception:
            logger.exception("hidden states: cannot record a change of the weights")

    def update(*_: Any, **__: Any) -> None:
        safely(before_update)

    def check(_owner: Any, action: Any = None, *_: Any, **__: Any) -> None:
        if action == sglang_compat.RESET_ACTION:
            safely(before_update)

    def release(_owner: Any, request: Any = None, *_: Any, **__: Any) -> None:
        tags = getattr(request, "tags", None)
        if not tags or sglang_compat.WEIGHTS_TAG in tags:
            safely(before_update)

    def label(_result: Any, _owner: Any, new_version: Any = None, *_: Any, **__: Any) -> None:
        if new_version is not None:
            safely(after_label, str(new_version))

    def request_label(result: Any, owner: Any, request: Any = None, *_: Any, **__: Any) -> None:
        if getattr(result, "success", False):
            label(result, owner, getattr(request, "weight_version", None))

    def late(_result: Any, runner: Any, *_: Any, **__: Any) -> None:
        safely(after_late_load, runner)

    for hooked, hook in (
        *((target, update) for target in sglang_compat.WEIGHT_UPDATES),
        (sglang_compat.CHECK_WEIGHTS, check),
        (sglang_compat.RELEASE_MEMORY, release),
    ):
        for place in _present(hooked):
            register_before(place, hook)
    for place in _present(sglang_compat.LATE_WEIGHTS):
        register_after(place, late)
    labels = _present(sglang_compat.NEW_LABEL)
    for place in labels:
        register_after(place, label)
    if not labels:
        for hooked in sglang_compat.LABELLING_REQUESTS:
            for place in _present(hooked):
                register_after(place, request_label)


def _present(target: sglang_compat.Symbol) -> list[str]:
    """The places of `target` that exist in this release, as the hook registry names them."""
    found = []
    for place in target.places:
        with suppress(ImportError, AttributeError):
            pkgutil.resolve_name(place)
            found.append(place.replace(":", "."))
    return found


# ---- one forward -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PrefillBatch:
    """The host-side description of one prefill forward; see `spans.plan_spans`."""

    rids: Sequence[str]
    extend_lens: list[int]
    prefix_lens: list[int]
    prompt_lens: Sequence[int] | None
    live_rows: int | None
    input_ids: torch.Tensor  # [rows, padding included]


def is_prefill(forward_batch: Any) -> bool:
    """Whether this forward extends prompts. False for decode, idle, and relabelled batches."""
    mode = getattr(forward_batch, "forward_mode", None)
    if mode is None or mode.name not in ("EXTEND", "MIXED"):
        return False
    # DP attention relabels decode and idle batches, so that all ranks run the same shape.
    return getattr(forward_batch, "_original_forward_mode", None) is None


def request_ids(forward_batch: Any) -> Sequence[str]:
    return getattr(forward_batch, "rids", None) or ()


def any_rank_prefills(forward_batch: Any) -> bool:
    """Whether any data-parallel rank extends in this forward; the same on all of them."""
    return bool(getattr(forward_batch, "is_extend_in_batch", True))


def read_batch(forward_batch: Any) -> PrefillBatch:
    """Raises EngineError."""
    # Before padding, counted by the engine; 0 or absent means it did not count.
    live_rows = getattr(forward_batch, "global_num_token_non_padded_cpu", None) or getattr(
        forward_batch, "num_token_non_padded_cpu", None
    )
    return PrefillBatch(
        rids=request_ids(forward_batch),
        extend_lens=_int_list(forward_batch, "extend_seq_lens_cpu"),
        prefix_lens=_int_list(forward_batch, "extend_prefix_lens_cpu"),
        prompt_lens=getattr(request_ids(forward_batch), "prompt_lens", None),
        live_rows=int(live_rows) if live_rows else None,
        input_ids=_get(forward_batch, "input_ids"),
    )


class RequestIds(list[str]):
    """The rids of a batch, with the lengths of the prompts.

    The engine copies a batch field by field on its way to the model, and an attribute of ours would
    not be copied; an attribute of a field's value is.
    """

    prompt_lens: list[int]  # tokens of each request's prompt


def note_prompt_lengths(forward_batch: Any, _cls: Any, batch: Any, *_: Any, **__: Any) -> None:
    """After `ForwardBatch.init_new`: keep how long each request's prompt is.

    The forward batch does not say where a prompt ends, and rows past its end are decoded tokens: in
    a mixed chunk, or when a retracted request is computed again.
    """
    # Without it nothing is cut, and the client sees the surplus rows; raised here, it would be the
    # engine's error.
    with suppress(Exception):
        if is_prefill(forward_batch):
            rids = RequestIds(forward_batch.rids)
            rids.prompt_lens = [len(request.origin_input_ids) for request in batch.reqs]
            forward_batch.rids = rids


class EngineSettings:
    """The server's settings, as the engine resolved them.

    Since 0.5.20 `ServerArgs` holds the user's input, without defaults, and the resolved values are
    in the process's context; before, the record itself was written to. A record that is not the
    published one (0.5.18 and older, or a process without context) is read as it is.
    """

    def __init__(self, record: Any) -> None:
        self._record = record
        # Always loaded where a model is; a test process without an engine need not import one.
        module = sys.modules.get("sglang.srt.runtime_context")
        get_context = getattr(module, "get_context", None)
        self._leaf = getattr(get_context(), "config_leaf", None) if get_context else None

    def get(self, name: str, default: Any = None) -> Any:
        """The setting `name`, or `default` in a release that has no such setting."""
        if not hasattr(self._record, name):
            return default
        if self._leaf is not None:
            try:
                return self._leaf(name)
            except (ValueError, AttributeError):  # not published, or none of the context's
                pass
        return getattr(self._record, name)

    def need(self, name: str) -> Any:
        """Raises EngineError where there is no such setting."""
        _get(self._record, name)
        return self.get(name)


# ---- look-ups ----------------------------------------------------------------------------------


def _attention_tp_rank() -> int:
    parallel = _parallel_context()
    if parallel is not None:
        return int(parallel.attn_tp_rank)
    return int(importlib.import_module("sglang.srt.layers.dp_attention").get_attention_tp_rank())


def _data_parallel_sizes(settings: EngineSettings) -> tuple[int, int]:
    """Attention groups within one forward, and replicas with forwards of their own."""
    dp_size = int(settings.need("dp_size"))
    groups = settings.get("attn_dp_size")
    if groups is not None:  # 0.5.22 and newer distinguish the two
        return int(groups), dp_size
    return (dp_size, 1) if settings.need("enable_dp_attention") else (1, dp_size)


def _data_parallel_rank(runner: Any, *, groups: int, replicas: int) -> int | None:
    if groups == 1 and replicas == 1:
        return 0
    parallel = _parallel_context()
    if groups > 1:
        if parallel is not None:
            return int(parallel.attn_dp_rank)
        module = importlib.import_module("sglang.srt.layers.dp_attention")
        return int(module.get_attention_dp_rank())
    for owner in (runner, getattr(runner, "ps", None), parallel):
        rank = getattr(owner, "dp_rank", None)
        if rank is not None:
            return int(rank)
    return None


def _parallel_context() -> Any:
    """`get_parallel()` of 0.5.15 and newer, None before."""
    try:
        return importlib.import_module("sglang.srt.runtime_context").get_parallel()
    except (ImportError, AttributeError):
        return None


def _get(owner: Any, *names: str) -> Any:
    for name in names:
        try:
            return getattr(owner, name)
        except AttributeError:
            continue
    raise EngineError(f"{type(owner).__name__} has no {' or '.join(names)} in SGLang {version()}")


def _int_list(owner: Any, name: str) -> list[int]:
    """A list attribute, which DP attention replaces by a host tensor."""
    values = _get(owner, name)
    if values is None:
        raise EngineError(f"{type(owner).__name__}.{name} is None")
    if isinstance(values, torch.Tensor):
        if values.device.type != "cpu":
            raise EngineError(f"{type(owner).__name__}.{name} is not in host memory")
        values = values.tolist()
    return [int(value) for value in values]


def _text_or_none(value: Any) -> str | None:
    return None if value is None else str(value)

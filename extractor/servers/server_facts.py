"""The facts that one server start computes with, and the ones that change the states. Pure.

Each fact is either bound or only recorded. A bound fact changes the states: rows computed under two
of its values must not share a data set unless the user allows it. The others only change rounding
(another attention kernel, another split over GPUs); they are recorded with each start, and the
canary (extractor/servers/canary.py) confirms that the difference stays within rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from extractor.core.identity import Identity
from extractor.core.version import __version__
from server_patch.dump_format import MODEL_KEYS, Ready

Facts = Mapping[str, Any]
"""JSON-ready, by name: `facts_of`."""

#: Bound keys of READY.json: every fact about the model, except its place, and the KV cache's dtype.
BOUND: Final = (*(key for key in MODEL_KEYS if key != "model_path"), "kv_cache_dtype")
#: Bound entries of its `settings`: precision, overrides of the model's configuration, adapters, and
#: approximations of attention or experts.
BOUND_SETTINGS: Final = frozenset(
    (
        "quantization_param_path", "torchao_config", "modelopt_quant", "quantize_and_serve",
        "rl_quant_profile", "prefill_kv_cache_dequant_dtype", "qsa_indexer_dtype",
        "enable_deepseek_v4_fp4_indexer", "mamba_ssm_dtype",
        "enable_mamba_cache_stochastic_rounding", "enable_int8_mamba_checkpoint",
        "deepep_dispatcher_output_dtype", "flashinfer_mxfp4_moe_precision",
        "enable_w4a4_mxfp4_megamoe", "enable_quant_communications",
        "json_model_override_args", "context_length", "forward_hooks",
        "enable_lora", "lora_paths", "lora_target_modules", "max_lora_rank",
        "enable_hisparse", "hisparse_config", "enable_encoder_swa_bounded_replay",
        "enable_decoder_swa_bounded_replay", "kt_weight_path", "kt_method", "kt_num_gpu_experts",
        "kt_max_deferred_experts_per_token",
    )
)  # fmt: skip
#: Entries that transformers and the engine fill with defaults. A new version may change them for
#: the same model, so they are bound only while both versions stay the same.
RESOLVED_SETTINGS: Final = frozenset(("model_config", "rope"))
_RECORDED: Final = (
    "model_path", "engine_version", "plugin_version", "weights", "weights_layout",
    "weight_version", "tp_size", "dp_size", "capture_method", "chunked_prefill_size",
    "radix_cache",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One bound fact whose value changed."""

    name: str
    before: Any
    now: Any

    def to_text(self) -> str:
        """A line for a message."""
        line = f"  {self.name}: was {_shown(self.before)}, is {_shown(self.now)}"
        if self.name == "weights" and "+" in str(self.now):
            line += " (updated in place: restart the server to get back what it loaded)"
        return line


def facts_of(ready: Ready) -> dict[str, Any]:
    """The facts that a server start announced, as the manifest keeps them."""
    facts = {"tool_version": __version__}
    announced = ready.to_document()
    facts |= {name: announced[name] for name in (*BOUND, *_RECORDED)}
    # An older plugin announces no settings; a newer one always announces some.
    return {**facts, "settings": dict(sorted(ready.engine.settings.items())) or None}


def facts_of_identity(identity: Identity) -> dict[str, Any]:
    """The known facts of a data set that has no recorded start: one of the first version."""
    names = ("architecture", "config_digest", "quantization")
    return {name: getattr(identity.model, name) for name in names}


def was_updated(ready: Ready) -> bool:
    """Whether the weights were updated in place since the server loaded them."""
    return ready.weights.id is not None and "+" in ready.weights.id


def differences(before: Facts, now: Facts) -> list[Difference]:
    """The bound facts in which `now` differs from `before`.

    A fact missing from `before` (an older version wrote it) does not differ; one missing from `now`
    alone does.
    """
    pairs = [(name, before[name], now.get(name)) for name in BOUND if name in before]
    settings_before, settings_now = before.get("settings"), now.get("settings")
    # An older plugin announces no settings; the missing weights already show the difference.
    if settings_before is not None and settings_now is not None:
        names = set(BOUND_SETTINGS)
        if before.get("engine_version") == now.get("engine_version") and (
            settings_before.get("transformers") == settings_now.get("transformers")
        ):
            names |= RESOLVED_SETTINGS
        pairs += [
            (name, settings_before.get(name), settings_now.get(name)) for name in sorted(names)
        ]
    if _are_weights_comparable(before, now):
        pairs.append(("weights", before["weights"], now.get("weights")))
    return [
        Difference(name=name, before=one, now=other) for name, one, other in pairs if one != other
    ]


def _are_weights_comparable(before: Facts, now: Facts) -> bool:
    if before.get("weights") is None:
        return False
    # Another tensor-parallel size stores other slices; then only the canary detects a change.
    return now.get("weights") is None or before.get("weights_layout") == now.get("weights_layout")


def _shown(value: object) -> str:
    if value is None:
        return "none"
    text = str(value)
    return text if len(text) <= 120 else text[:117] + "..."

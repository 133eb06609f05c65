"""An out-of-tree SGLang platform that is plain torch on the CPU.

It is chosen by ``SGLANG_PLATFORM=torchcpu``; with any other value nothing here has an effect.
SGLang finds it by two entry points:

* ``sglang.srt.platforms``: :func:`activate` names the platform class;
* ``sglang.srt.plugins``: :func:`install_hooks` mends a gap of the ``torch_native`` attention.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

PLATFORM = "torchcpu"
_MLA_DISPATCH = "sglang.srt.models.deepseek_common.attention_backend_handler"


def activate() -> str | None:
    """Return the platform class as ``module.Class``, or None when another platform is asked for."""
    return f"{__name__}.TorchCpu" if os.environ.get("SGLANG_PLATFORM") == PLATFORM else None


def __getattr__(name: str) -> Any:
    # The class is built on first use: SGLang imports this module while it is itself half imported,
    # so a base class taken from SGLang at module level would be a circular import.
    if name != "TorchCpu":
        raise AttributeError(name)
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import SRTPlatform

    class TorchCpu(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
        """CPU device, no Triton, no graph capture (the inherited defaults), eager kernels."""

        _enum = PlatformEnum.OOT

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def is_pin_memory_available(self, device: Any = None) -> bool:
            return False

        def get_dispatch_key_name(self) -> str:
            return "native"

        def get_compile_backend(self, mode: Any = None) -> str:
            return "eager"

    globals()["TorchCpu"] = TorchCpu
    return TorchCpu


def install_hooks() -> None:
    """Make DeepSeek's latent attention (MLA) work with ``torch_native``.

    That backend registers no MLA handler and falls back to triton's, which picks plain multi-head
    attention for a prefill without prefix; ``torch_native`` then reads the latent KV cache as if it
    held full keys and fails on the shape. Absorbed MLA is right for every case, so always use it.
    """
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def get_handler(original: Any, registry: Any, backend_name: str) -> Any:
        if backend_name != "torch_native":
            return original(registry, backend_name)
        return importlib.import_module(_MLA_DISPATCH)._dispatch_mla_subtype

    target = f"{_MLA_DISPATCH}.AttentionBackendRegistry.get_handler"
    HookRegistry.register(target, get_handler, HookType.AROUND)

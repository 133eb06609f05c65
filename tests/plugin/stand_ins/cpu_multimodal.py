"""Lets SGLang serve text prompts of a multimodal model without an image processor: an SGLang plugin
for the tests' servers.

The engine makes one at start whatever will be asked, and it needs torchvision. A prompt of token
ids never meets it; the wrapper class, its routine for embeddings and the text model stay the
engine's own.
"""

from __future__ import annotations


def hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    manager = "sglang.srt.managers.tokenizer_manager"
    for name in ("get_processor_wrapper", "get_mm_processor"):
        HookRegistry.register(f"{manager}.{name}", lambda *_, **__: None, HookType.REPLACE)

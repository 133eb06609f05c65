"""Keeps h[n] of a forward, from the final norm of the model."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch


class NormProbe:
    """Keeps h[n], the residual that the final norm adds up; the engine does not return it."""

    def __init__(self, norm: Any) -> None:
        self._listening = False
        self._seen: torch.Tensor | None = None
        norm.register_forward_hook(self._after_norm)

    def listen(self) -> None:
        """Prepare to keep h[n] of the next forward."""
        self._seen = None
        self._listening = True

    def take(self) -> torch.Tensor | None:
        """h[n] [T, H] of the forward since `listen`, or None if the norm did not show it.

        Not a copy: good until the next kernel on this stream that writes to it.
        """
        seen, self._seen, self._listening = self._seen, None, False
        return seen

    def _after_norm(self, _module: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if not self._listening:
            return
        # Raised here, an error would be the model's.
        with suppress(Exception):
            if isinstance(output, tuple):
                # The fused kernel adds the residual in place and returns the sum.
                self._seen = output[1]
            elif inputs and inputs[0].data_ptr() != output.data_ptr():
                # No residual apart: the input is h[n], unless the norm overwrote it.
                self._seen = inputs[0]

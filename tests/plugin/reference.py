"""The same states by Hugging Face: the judge of ours."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Truth:
    """All states of one prompt, float32."""

    boundaries: list[np.ndarray]  # h[0] .. h[n-1], each [rows, H]
    last_pre: np.ndarray  # h[n]
    last: np.ndarray  # after the final norm

    def rows(self, rows: range) -> Truth:
        """Of these rows alone."""
        part = slice(rows.start, rows.stop)
        return Truth(
            boundaries=[state[part] for state in self.boundaries],
            last_pre=self.last_pre[part],
            last=self.last[part],
        )


class Reference:
    """A model loaded by transformers: the folder's own, or the one in it that says the same."""

    def __init__(self, model: Path) -> None:
        import torch
        from rig.derived import REFERENCE
        from transformers import AutoModelForCausalLM

        if (model / REFERENCE).exists():
            model = model / REFERENCE
        self.config = json.loads((model / "config.json").read_bytes())
        self._torch = torch
        torch.set_num_threads(1)  # see `serving.serve`
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._model.eval()
        # Hugging Face's last entry of hidden_states is post-norm; h[n] is what enters the norm.
        self._pre: list[torch.Tensor] = []
        self._final_norm().register_forward_pre_hook(
            lambda _module, inputs: self._pre.append(inputs[0])
        )

    def next_token(self, last: np.ndarray) -> int:
        """What the model says after a row [H] of the last state, post norm."""
        with self._torch.no_grad():
            return int(self._model.lm_head(self._torch.tensor(last)).argmax())

    def _final_norm(self) -> Any:
        stack = self._model.base_model
        names = ("norm", "final_layernorm", "final_layer_norm", "ln_f")
        stack = getattr(stack, "decoder", stack)  # OPT
        return next(getattr(stack, name) for name in names if hasattr(stack, name))

    def states(self, ids: Sequence[int]) -> Truth:
        self._pre.clear()
        with self._torch.no_grad():
            output = self._model(self._torch.tensor([list(ids)]), output_hidden_states=True)
        states = [state[0].numpy() for state in output.hidden_states]
        return Truth(boundaries=states[:-1], last=states[-1], last_pre=self._pre[0][0].numpy())


def relative_error(got: np.ndarray, truth: np.ndarray) -> float:
    """Largest difference over the largest true value; rows and columns must be the same."""
    assert got.shape == truth.shape
    return float(np.abs(got - truth).max() / np.abs(truth).max())

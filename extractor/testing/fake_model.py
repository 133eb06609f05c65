"""A model without weights: its states are a pure function of the tokens before them, as a causal
model's are, so that every stored value can be checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from server_patch.dump_format import StateLayout

_HASH_STEP = 0x9E3779B1  # 2**32 divided by the golden ratio: spreads neighbours far apart


@dataclass(kw_only=True)
class FakeModel:
    """What the fake server pretends to serve."""

    layout: StateLayout = field(
        default_factory=lambda: StateLayout(
            boundaries=(1, 2, 3), hidden_size=8, dtype="BF16", last_kind="post"
        )
    )
    vocab_size: int = 1000
    num_layers: int = 4
    context_length: int = 4096
    model_path: str = field(default="fake/model", init=False)
    #: Each number is a checkpoint of the same shape with its own states and fingerprint.
    checkpoint: int = 0
    fingerprint: int | None = None  # announced instead of the checkpoint's own
    weight_version: str = field(default="default", init=False)
    kv_cache_dtype: str | None = "auto"
    settings: Mapping[str, str] = field(default_factory=lambda: {"device": "fake"})

    @property
    def weights(self) -> str:
        return f"{self.checkpoint if self.fingerprint is None else self.fingerprint:032x}"


def fake_states(
    ids: npt.NDArray[np.int32], layout: StateLayout, *, checkpoint: int = 0
) -> dict[str, npt.NDArray[Any]]:
    """The states of a prompt: name -> [N, width], uint16 bit patterns for 16-bit dtypes.

    Row t depends on ids[0..t] alone, and on the boundary, the column and the checkpoint.
    """
    positions = np.arange(1, len(ids) + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        prefix = np.cumsum((ids.astype(np.uint64) + 1) * positions * _HASH_STEP)
        states: dict[str, npt.NDArray[Any]] = {}
        for salt, name in enumerate(layout.state_names):
            columns = np.arange(layout.state_width(name), dtype=np.uint64) + salt * 1_000_003
            columns += np.uint64(checkpoint * 7_000_003)
            mixed = (prefix[:, None] + columns[None, :] * _HASH_STEP) * _HASH_STEP
            values = ((mixed >> np.uint64(16)) & np.uint64(0xFFFF)).astype(np.float32)
            states[name] = _encoded(values / 32768.0 - 1.0, layout.dtype)
    return states


def _encoded(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    match dtype:
        case "F32":
            return values
        case "F16":
            return values.astype(np.float16).view(np.uint16)
        case _:
            # bfloat16 is the upper half of float32.
            return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)

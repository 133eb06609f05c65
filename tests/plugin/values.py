"""Prompts, and whether states are the right ones."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np

from plugin.reference import Truth, relative_error

TOLERANCE = 1e-5  # relative, float32: kernels and batches differ, layers do not


def make_ids(seed: int, rows: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, 500) for _ in range(rows)]


def boundary_of(sample: Mapping[str, np.ndarray], index: int) -> np.ndarray:
    hidden = sample["last"].shape[1]
    return sample["aux"][:, index * hidden : (index + 1) * hidden]


def assert_is(
    sample: Mapping[str, np.ndarray], ids: Sequence[int], boundaries: Sequence[int], truth: Truth
) -> None:
    """`sample` holds the rows of `truth`, and they are those of `ids`."""
    assert sample["input_ids"].tolist() == list(ids)
    for index, boundary in enumerate(boundaries):
        error = relative_error(boundary_of(sample, index), truth.boundaries[boundary])
        assert error < TOLERANCE, f"boundary {boundary}: {error}"
    assert relative_error(sample["last"], truth.last) < TOLERANCE
    assert relative_error(sample["last_pre"], truth.last_pre) < TOLERANCE

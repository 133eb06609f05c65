"""Prompts and their keys."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prompts.types import Prompt, RowOrigin, prompt_key


def make_prompt(ids: list[int], mask: list[int]) -> Prompt:
    return Prompt(
        ordinal=0,
        origin=RowOrigin(source="a.jsonl", line=1),
        label=None,
        input_ids=np.array(ids, dtype=np.int32),
        loss_mask=np.array(mask, dtype=np.uint8),
    )


def test_the_key_is_pinned_because_manifests_on_disk_hold_it() -> None:
    assert make_prompt([1, 2, 3], [0, 0, 1]).key == "2e6e5603f12dd9d3dabe73fc0253279d"


@pytest.mark.parametrize("dtype", [">i4", "<i8", "u4"])
def test_the_key_does_not_depend_on_the_integer_type_of_a_copy(dtype: str) -> None:
    ids, mask = np.array([1, 70_000, 3], dtype=dtype), np.array([0, 1, 1], dtype=dtype)
    assert prompt_key(ids, mask) == make_prompt([1, 70_000, 3], [0, 1, 1]).key


def test_the_key_of_a_strided_view_is_that_of_its_values() -> None:
    ids = np.arange(6, dtype=np.int32)
    mask = np.ones(6, dtype=np.uint8)
    assert prompt_key(ids[::2], mask[::2]) == make_prompt([0, 2, 4], [1, 1, 1]).key


rows = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 1)), min_size=1)


@given(rows, rows)
def test_prompts_have_equal_keys_exactly_when_ids_and_mask_are_equal(
    one: list[tuple[int, int]], other: list[tuple[int, int]]
) -> None:
    keys = [make_prompt([i for i, _ in row], [m for _, m in row]).key for row in (one, other)]
    assert (keys[0] == keys[1]) == (one == other)


def test_the_mask_is_part_of_the_key() -> None:
    assert make_prompt([1, 2], [0, 1]).key != make_prompt([1, 2], [1, 1]).key


def test_counts_come_from_the_arrays() -> None:
    prompt = make_prompt([5, 6, 7], [0, 1, 1])
    assert (prompt.num_tokens, prompt.num_trained) == (3, 2)


def test_a_prompt_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_prompt([1], [1]).ordinal = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        (np.zeros(2, np.int32), np.zeros(3, np.uint8), "equally long"),
        (np.zeros((1, 2), np.int32), np.zeros((1, 2), np.uint8), "flat"),
        (np.zeros(2, np.int64), np.zeros(2, np.uint8), "input_ids must be int32"),
        (np.zeros(2, np.int32), np.zeros(2, np.bool_), "loss_mask must be uint8"),
        (np.zeros(0, np.int32), np.zeros(0, np.uint8), "must not be empty"),
    ],
)
def test_a_prompt_refuses_arrays_of_another_kind(
    ids: npt.NDArray[np.generic], mask: npt.NDArray[np.generic], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Prompt(
            ordinal=0,
            origin=RowOrigin(source="a", line=1),
            label=None,
            input_ids=ids,  # type: ignore[arg-type]  # another kind, as nothing checked it
            loss_mask=mask,  # type: ignore[arg-type]
        )

"""The canary: equal states are accepted, different ones are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import make_header
from hypothesis import given
from hypothesis import strategies as st

from extractor.servers.canary import (
    NUM_TOKENS,
    TOLERANCES,
    canary_ids,
    compare,
    encode_canary,
    ids_of,
)
from server_patch.dump_format import DumpFormatError, decode_header

HIDDEN = 16
ROWS = 24
rng = np.random.default_rng(0)
AUX = rng.standard_normal((ROWS, 3 * HIDDEN)).astype(np.float32)
LAST = rng.standard_normal((ROWS, HIDDEN)).astype(np.float32)


def packed(values: np.ndarray, dtype: str) -> bytes:
    match dtype:
        case "F32":
            return values.astype("<f4").tobytes()
        case "F16":
            return values.astype("<f2").tobytes()
        case _:
            return (values.astype("<f4").view(np.uint32) >> 16).astype("<u2").tobytes()


def canary(
    aux: np.ndarray = AUX, last: np.ndarray = LAST, *, dtype: str = "F32", **changes: Any
) -> bytes:
    ids = np.arange(len(aux), dtype="<i4")
    header = make_header(hidden_size=HIDDEN, dtype=dtype, **changes)
    return encode_canary(
        header,
        {"aux": packed(aux, dtype), "last": packed(last, dtype), "input_ids": ids.tobytes()},
    )


@pytest.mark.parametrize("dtype", sorted(TOLERANCES))
def test_equal_states_have_no_error(dtype: str) -> None:
    comparison = compare(canary(dtype=dtype), canary(dtype=dtype, boot_id="other", weights="w"))
    assert comparison.error == 0
    assert comparison.is_same


@pytest.mark.parametrize("dtype", sorted(TOLERANCES))
def test_rounding_is_within_the_tolerance_and_ten_times_the_tolerance_is_not(dtype: str) -> None:
    noise = rng.standard_normal(LAST.shape).astype(np.float32)
    noise /= np.linalg.norm(noise, axis=1, keepdims=True)
    size = np.linalg.norm(LAST, axis=1, keepdims=True)
    for factor, is_same in ((0.5, True), (2.0, False)):
        other = LAST + noise * size * factor * TOLERANCES[dtype]
        comparison = compare(canary(dtype=dtype), canary(last=other, dtype=dtype))
        assert comparison.is_same is is_same, comparison
        assert comparison.state == "last"
        assert comparison.error == pytest.approx(factor * TOLERANCES[dtype], rel=0.2)


def test_the_comparison_names_the_state_with_the_largest_error() -> None:
    other = AUX.copy()
    other[:, HIDDEN : 2 * HIDDEN] *= 1.5
    comparison = compare(canary(), canary(other))
    assert comparison.state == "h[2]"
    assert comparison.error == pytest.approx(0.5)
    assert "h[2] differs by 0.5 " in comparison.to_text()


def test_a_neighbouring_layer_is_not_the_same() -> None:
    rolled = np.roll(AUX, HIDDEN, axis=1)
    for dtype in TOLERANCES:
        assert not compare(canary(dtype=dtype), canary(rolled, dtype=dtype)).is_same


def test_large_errors_of_single_tokens_are_tolerated() -> None:
    other = LAST.copy()
    other[:4] = 7.0
    assert compare(canary(), canary(last=other)).is_same
    other[-4:] = 7.0
    assert not compare(canary(), canary(last=other)).is_same


def test_states_that_are_not_finite() -> None:
    broken = LAST.copy()
    broken[3, 0] = np.nan
    assert compare(canary(last=broken), canary(last=broken)).error == 0
    assert compare(canary(last=broken), canary()).error == 0
    assert compare(canary(), canary(last=broken)).error == float("inf")


def test_another_layout_is_not_the_same() -> None:
    comparison = compare(canary(), canary(boundaries=(1, 2, 4)))
    assert comparison.error == float("inf")
    assert not comparison.is_same


def test_a_canary_is_kept_as_a_dump_with_its_tokens() -> None:
    data = canary(rid="xtr-a-b-0-1", start=5, rows=3, weights="w")
    header = decode_header(data, file_bytes=len(data)).header
    assert (header.rid, header.start, header.rows, header.weights) == ("canary", 0, ROWS, "w")
    assert ids_of(data).tolist() == list(range(ROWS))


def test_a_damaged_canary_is_refused() -> None:
    data = canary()
    for damaged in (data[:-1], b"", data[:9] + b"x" + data[10:]):
        with pytest.raises(DumpFormatError):
            compare(damaged, data)
        with pytest.raises(DumpFormatError):
            ids_of(damaged)


@given(st.integers(1, 200_000), st.integers(1, 100))
def test_canary_tokens_are_in_the_vocabulary_and_the_same_each_time(
    vocab_size: int, max_tokens: int
) -> None:
    ids = canary_ids(vocab_size=vocab_size, max_tokens=max_tokens)
    assert len(ids) == min(NUM_TOKENS, max_tokens)
    assert ids.min() >= 0 and ids.max() < vocab_size
    assert np.array_equal(ids, canary_ids(vocab_size=vocab_size, max_tokens=max_tokens))
    if vocab_size > 20_000:
        assert len(set(ids.tolist())) == len(ids)
        assert ids.min() >= 100 and ids.max() < 20_000

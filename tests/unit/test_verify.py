"""The proofs: each lets the good through and names what is bad."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import LAYOUT, make_header, make_ready
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from extractor.core.checks import (
    ReplyFacts,
    check_finite,
    check_header,
    check_ids,
    check_reply,
    first_nonfinite,
)
from extractor.core.failure import FailureKind
from manifest.states import Reason


def as_float(patterns: np.ndarray, dtype: str) -> np.ndarray:
    match dtype:
        case "F32":
            return patterns.view(np.float32)
        case "F16":
            return patterns.view(np.float16)
        case _:  # bfloat16 is the upper half of float32
            return (patterns.astype(np.uint32) << 16).view(np.float32)


@given(
    st.sampled_from(["BF16", "F16", "F32"]).flatmap(
        lambda dtype: st.tuples(
            st.just(dtype),
            hnp.arrays(np.uint32 if dtype == "F32" else np.uint16, st.integers(0, 60)),
        )
    )
)
def test_the_first_value_that_is_not_finite_is_where_floats_say(
    case: tuple[str, np.ndarray],
) -> None:
    dtype, patterns = case
    bad = np.flatnonzero(~np.isfinite(as_float(patterns, dtype)))
    expected = int(bad[0]) if bad.size else None
    assert first_nonfinite(memoryview(patterns.tobytes()), dtype) == expected


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_16_bit_pattern_is_judged_as_floats_say(dtype: str) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    finite = np.isfinite(as_float(patterns, dtype))
    found = [
        first_nonfinite(memoryview(pattern.tobytes()), dtype) is None for pattern in patterns[::7]
    ]
    assert found == finite[::7].tolist()


@pytest.mark.parametrize("kind", ["nan", "inf", "-inf"])
def test_nan_and_both_infinities_are_found_among_the_largest_finite(kind: str) -> None:
    values = np.full(1000, np.finfo(np.float32).max, dtype=np.float32)
    assert first_nonfinite(memoryview(values.tobytes()), "F32") is None
    values[700] = float(kind)
    assert first_nonfinite(memoryview(values.tobytes()), "F32") == 700


def test_a_value_that_is_not_finite_is_named_by_row_and_boundary() -> None:
    block = memoryview(np.array([0, 0x7FC0], dtype="<u2").tobytes())  # 0 and NaN in bfloat16
    # Row 2 of the piece, column 9: the second boundary's second value.
    failure = check_finite(block, at=2 * (2 * 24 + 8), name="aux", start=100, layout=LAYOUT)
    assert failure is not None
    assert failure.detail == "aux holds NaN or infinity at row 102, boundary 2"
    failure = check_finite(block, at=2 * (2 * 8 + 6), name="last", start=100, layout=LAYOUT)
    assert failure is not None
    assert failure.detail == "last holds NaN or infinity at row 102"


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.data())
def test_equal_ids_pass_and_the_first_other_one_is_named(
    ids: list[int], data: st.DataObject
) -> None:
    sent = np.array(ids, dtype=np.int32)
    start = data.draw(st.integers(0, len(ids) - 1))
    end = data.draw(st.integers(start + 1, len(ids)))
    found = sent[start:end].copy()
    assert check_ids(sent, found, start=start) is None
    at = data.draw(st.integers(0, len(found) - 1))
    found[at:] += 1
    failure = check_ids(sent, found, start=start)
    assert failure is not None
    assert failure.reason is Reason.WRONG_TOKENS
    assert failure.detail == (
        f"row {start + at} holds token {ids[start + at] + 1}, sent was {ids[start + at]}"
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("boot_id", "another"), ("rank", 1), ("boundaries", (1, 2)), ("hidden_size", 16),
        ("dtype", "F16"), ("last_kind", "both"),
    ],
)  # fmt: skip
def test_a_dump_of_another_layout_is_refused_by_field(field: str, value: object) -> None:
    assert check_header(make_header(), make_ready()) is None
    failure = check_header(make_header(**{field: value}), make_ready())
    assert failure is not None
    assert (failure.reason, failure.kind) == (Reason.WRONG_LAYOUT, FailureKind.PERMANENT)
    assert f"dump 7: {field} is {value!r}, READY.json says" in failure.detail


def facts(**changes: object) -> ReplyFacts:
    values = {"prompt_tokens": 5, "cached_tokens": 0, **changes}
    return ReplyFacts(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reply", "reason", "kind"),
    [
        (facts(), None, None),
        (facts(prompt_tokens=4), Reason.TRUNCATED, FailureKind.PERMANENT),
        (facts(prompt_tokens=6), Reason.TRUNCATED, FailureKind.PERMANENT),
        (facts(cached_tokens=1), Reason.CACHED, FailureKind.SAMPLE),
    ],
)
def test_an_answer_proves_that_every_row_was_computed(
    reply: ReplyFacts, reason: Reason | None, kind: FailureKind | None
) -> None:
    failure = check_reply(reply, num_tokens=5)
    assert (failure.reason if failure else None) is reason
    assert (failure.kind if failure else None) is kind

"""Rows of a forward and whose they are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server_patch.spans import Span, SpanError, is_ours, plan_spans, split_spans


def test_foreign_requests_move_the_offset() -> None:
    spans = plan_spans(
        rids=["xtr-a", "other", "xtr-b"],
        extend_lens=[7, 5, 9],
        prefix_lens=[0, 3, 32],
        rid_prefix="xtr-",
        total_rows=21,
    )
    assert spans == [
        Span(rid="xtr-a", start=0, begin=0, rows=7),
        Span(rid="xtr-b", start=32, begin=12, rows=9),
    ]


def test_a_rid_that_is_no_text_is_foreign() -> None:
    assert not is_ours(None, "xtr-")
    assert not is_ours(["xtr-a"], "xtr-")
    assert is_ours("xtr-a", "xtr-")


def test_padding_rows_and_padding_requests_are_nobodys() -> None:
    spans = plan_spans(
        rids=["xtr-a"],
        extend_lens=[13, 0, 0],
        prefix_lens=[0, 0, 0],
        rid_prefix="xtr-",
        total_rows=16,
        live_rows=13,
    )
    assert spans == [Span(rid="xtr-a", start=0, begin=0, rows=13)]


def test_rows_past_the_prompt_are_left_out() -> None:
    """A mixed chunk carries one decode row of a request whose prompt ended before."""
    spans = plan_spans(
        rids=["xtr-new", "xtr-decoding", "xtr-again"],
        extend_lens=[4, 1, 12],
        prefix_lens=[0, 20, 0],
        rid_prefix="xtr-",
        total_rows=17,
        prompt_lens=[30, 20, 10],
    )
    assert spans == [
        Span(rid="xtr-new", start=0, begin=0, rows=4),
        Span(rid="xtr-again", start=0, begin=5, rows=10),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extend_lens": [7]}, "2 requests, but 1 lengths"),
        ({"prefix_lens": []}, "0 prefixes"),
        ({"total_rows": 9}, "requests have 10 rows, the states only 9"),
        ({"live_rows": 11}, "requests have 10 rows, the batch 11"),
        ({"extend_lens": [11, -1]}, "negative length"),
        ({"prefix_lens": [-1, 0]}, "negative prefix"),
        ({"prompt_lens": [7]}, "1 prompt lengths"),
    ],
)
def test_a_batch_that_contradicts_itself_is_an_error(
    change: dict[str, object], message: str
) -> None:
    batch: dict[str, object] = {
        "rids": ["xtr-a", "xtr-b"],
        "extend_lens": [7, 3],
        "prefix_lens": [0, 0],
        "rid_prefix": "xtr-",
        "total_rows": 10,
    }
    with pytest.raises(SpanError, match=message):
        plan_spans(**{**batch, **change})  # type: ignore[arg-type]


requests = st.lists(
    st.tuples(st.booleans(), st.integers(0, 40), st.integers(0, 1000)), min_size=1, max_size=20
)


@given(requests, st.integers(0, 8))
def test_every_row_of_ours_is_in_exactly_one_span(
    batch: list[tuple[bool, int, int]], padding: int
) -> None:
    rids = [f"{'xtr-' if ours else 'other-'}{i}" for i, (ours, _, _) in enumerate(batch)]
    lens = [length for _, length, _ in batch]
    owners = [rid for rid, length in zip(rids, lens, strict=True) for _ in range(length)]
    spans = plan_spans(
        rids=rids,
        extend_lens=lens,
        prefix_lens=[prefix for _, _, prefix in batch],
        rid_prefix="xtr-",
        total_rows=len(owners) + padding,
        live_rows=len(owners),
    )
    covered = {row: span.rid for span in spans for row in range(span.begin, span.end)}
    assert covered == {row: rid for row, rid in enumerate(owners) if rid.startswith("xtr-")}
    assert sum(span.rows for span in spans) == len(covered)


@given(requests, st.integers(1, 50))
def test_split_groups_fit_and_tile(batch: list[tuple[bool, int, int]], max_rows: int) -> None:
    spans = []
    begin = 0
    for i, (ours, length, prefix) in enumerate(batch):
        if ours and length:
            spans.append(Span(rid=f"xtr-{i}", start=prefix, begin=begin, rows=length))
        begin += length
    groups = split_spans(spans, max_rows=max_rows)
    for group in groups:
        assert group
        assert group[-1].end - group[0].begin <= max_rows
    parts = [span for group in groups for span in group]
    for span in spans:
        own = [part for part in parts if part.rid == span.rid]
        positions = [part.start + i for part in own for i in range(part.rows)]
        rows = [part.begin + i for part in own for i in range(part.rows)]
        assert positions == list(range(span.start, span.start + span.rows))
        assert rows == list(range(span.begin, span.end))

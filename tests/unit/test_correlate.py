"""Pieces make a whole exactly when they tile the prompt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extractor.dumps.correlator import Correlator, Match, Piece, tile

RID = "rid"


def piece(start: int, rows: int) -> Piece[int]:
    return Piece(start=start, rows=rows, handle=start)


@st.composite
def partitions(draw: st.DrawFn) -> tuple[int, list[Piece[int]]]:
    """(N, the pieces of [0, N) in some order)."""
    lengths = draw(st.lists(st.integers(1, 50), min_size=1, max_size=12))
    pieces, start = [], 0
    for rows in lengths:
        pieces.append(piece(start, rows))
        start += rows
    return start, draw(st.permutations(pieces))


@given(partitions())
def test_any_partition_in_any_order_is_complete_at_its_last_piece(
    partition: tuple[int, list[Piece[int]]],
) -> None:
    total, pieces = partition
    correlator = Correlator[int]()
    correlator.expect(RID, num_tokens=total)
    matches = [correlator.add(RID, one) for one in pieces]
    assert matches == [Match.WAITING] * (len(pieces) - 1) + [Match.COMPLETE]
    assert correlator.rows_seen(RID) == total
    starts = [one.start for one in correlator.close(RID)]
    assert starts == sorted(starts)
    assert correlator.close(RID) == []


@given(partitions(), st.data())
def test_a_missing_piece_is_never_complete(
    partition: tuple[int, list[Piece[int]]], data: st.DataObject
) -> None:
    total, pieces = partition
    missing = data.draw(st.sampled_from(pieces))
    assert tile([one for one in pieces if one is not missing], total) is Match.WAITING


@given(partitions(), st.data())
def test_a_row_that_comes_twice_is_a_conflict(
    partition: tuple[int, list[Piece[int]]], data: st.DataObject
) -> None:
    total, pieces = partition
    start = data.draw(st.integers(0, total - 1))
    extra = piece(start, data.draw(st.integers(1, total - start)))
    assert tile([*pieces, extra], total) is Match.CONFLICT
    correlator = Correlator[int]()
    correlator.expect(RID, num_tokens=total)
    matches = [correlator.add(RID, one) for one in [*pieces, extra]]
    assert matches[-1] is Match.CONFLICT
    assert len(correlator.close(RID)) == len(pieces) + 1  # the conflicting one as well


@given(partitions(), st.integers(-5, 200), st.integers(-5, 200))
def test_pieces_cover_as_a_set_of_rows_says(
    partition: tuple[int, list[Piece[int]]], start: int, rows: int
) -> None:
    """Against a model that counts every row."""
    total, pieces = partition
    pieces = [*pieces[1:], piece(start, rows)]
    covered = [row for one in pieces for row in range(one.start, one.end)]
    is_outside = rows < 1 or start < 0 or start + rows > total
    if is_outside or len(set(covered)) < len(covered):
        expected = Match.CONFLICT
    else:
        expected = Match.COMPLETE if len(covered) == total else Match.WAITING
    assert tile(pieces, total) is expected


@pytest.mark.parametrize("outside", [(-1, 2), (9, 2), (10, 1), (0, 0), (3, -1), (0, 11)])
def test_rows_outside_the_prompt_are_a_conflict(outside: tuple[int, int]) -> None:
    assert tile([piece(*outside)], 10) is Match.CONFLICT
    correlator = Correlator[int]()
    correlator.expect(RID, num_tokens=10)
    assert correlator.add(RID, piece(*outside)) is Match.CONFLICT


def test_pieces_that_nobody_waits_for_are_orphans() -> None:
    correlator = Correlator[int]()
    assert correlator.add(RID, piece(0, 1)) is Match.ORPHAN
    correlator.expect(RID, num_tokens=1)
    correlator.close(RID)
    assert correlator.add(RID, piece(0, 1)) is Match.ORPHAN
    assert correlator.close(RID) == []


def test_a_rid_is_expected_once_at_a_time() -> None:
    correlator = Correlator[int]()
    correlator.expect(RID, num_tokens=1)
    with pytest.raises(ValueError, match="expected already"):
        correlator.expect(RID, num_tokens=1)


def test_no_piece_is_not_a_whole() -> None:
    assert tile([], 1) is Match.WAITING

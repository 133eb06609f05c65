"""Batches of changes, applied to rows in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from manifest.exceptions import PromptChanged
from manifest.records import (
    Change,
    Failed,
    Forgotten,
    Lost,
    Planned,
    PromptFacts,
    Rejected,
    Relocated,
    Retried,
    Row,
    SourceRow,
    Stored,
    StoredSample,
)
from manifest.row_changes import RowBatch, RowCache
from manifest.states import IllegalTransition, Reason, State

ORIGIN = SourceRow(ordinal=7, source=1, line=3, label='"a"', part=1)
PROMPT = PromptFacts(key="k", num_tokens=5, num_trained=2, alterations=("cut", "dropped"))
UNALTERED_PROMPT = replace(PROMPT, alterations=())
OTHER_PROMPT = PromptFacts(key="other", num_tokens=6, num_trained=2)
CUT_PROMPT = PromptFacts(key="cut", num_tokens=4, num_trained=0, alterations=("truncated",))
SAMPLE = StoredSample(shard=2, offset=4096, size_bytes=10, digest="x", num_pieces=3)
PLANNED = Planned(origin=ORIGIN, prompt=PROMPT, detail="d")
STORED = Stored(ordinal=7, sample=SAMPLE, attempts=1)
FAILED = Failed(ordinal=7, reason=Reason.CACHED, detail="why", attempts=4)


def planned_at(ordinal: int) -> Planned:
    return replace(PLANNED, origin=replace(ORIGIN, ordinal=ordinal))


class File:
    """Rows that are loaded on demand; records the ordinals that were asked for."""

    def __init__(self, *rows: Row) -> None:
        self._rows = {row.ordinal: row for row in rows}
        self.asked: list[list[int]] = []

    def load(self, ordinals: Sequence[int]) -> list[Row]:
        self.asked.append(list(ordinals))
        return [self._rows[n] for n in ordinals if n in self._rows]


def fold(*changes: Change, file: File | None = None) -> RowBatch:
    return RowCache((file or File()).load, first_free=100 if file else 0).fold(changes)


def only(batch: RowBatch) -> Row:
    (row,) = batch.rows
    return row


def test_a_whole_life_in_one_batch_is_one_row() -> None:
    batch = fold(PLANNED, STORED)
    assert only(batch) == Row(
        origin=ORIGIN, prompt=PROMPT, state=State.STORED, detail="d", attempts=1, sample=SAMPLE
    )
    assert batch.shards == [2]


IN_FLIGHT = only(fold(PLANNED))
IN_SHARD = only(fold(PLANNED, STORED))
GIVEN_UP = only(fold(PLANNED, FAILED))
RETRIED, LOST = Retried(ordinal=7, attempts=1), Lost(ordinal=7, attempts=1)
MOVED, FORGOTTEN = Relocated(ordinal=7, shard=5, offset=1), Forgotten(ordinal=7)


@pytest.mark.parametrize(
    ("before", "allowed"),
    [
        (IN_FLIGHT, {PLANNED: State.PLANNED, RETRIED: State.PLANNED, LOST: State.PLANNED,
                     STORED: State.STORED, FAILED: State.FAILED}),
        (IN_SHARD, {MOVED: State.STORED, FORGOTTEN: State.PLANNED}),
        (GIVEN_UP, {}),
    ],
)  # fmt: skip
def test_every_change_of_every_state_is_made_or_refused(
    before: Row, allowed: dict[Change, State]
) -> None:
    """A failed row is only reopened, all of them at once, where the user asks for it."""
    for change in (PLANNED, RETRIED, LOST, STORED, FAILED, MOVED, FORGOTTEN):
        if change in allowed:
            assert only(fold(change, file=File(before))).state is allowed[change]
        else:
            with pytest.raises(IllegalTransition):
                fold(change, file=File(before))


@pytest.mark.parametrize(
    ("before", "change", "expected"),
    [
        (IN_FLIGHT, Retried(ordinal=7, attempts=2), {"attempts": 2}),
        (IN_FLIGHT, Lost(ordinal=7, attempts=1), {"attempts": 1, "num_deaths": 1}),
        (IN_FLIGHT, FAILED,
         {"state": State.FAILED, "reason": Reason.CACHED, "detail": "why", "attempts": 4}),
        (IN_FLIGHT, Planned(origin=replace(ORIGIN, line=99), prompt=UNALTERED_PROMPT),
         {"prompt": UNALTERED_PROMPT, "detail": None}),
        (IN_FLIGHT, Planned(origin=ORIGIN, prompt=CUT_PROMPT),
         {"prompt": CUT_PROMPT, "detail": None}),
        (IN_FLIGHT, Rejected(origin=ORIGIN, reason=Reason.TOO_LONG, detail="why"),
         {"state": State.FAILED, "reason": Reason.TOO_LONG, "detail": "why"}),
        (IN_SHARD, Relocated(ordinal=7, shard=5, offset=1),
         {"sample": replace(SAMPLE, shard=5, offset=1)}),
        (IN_SHARD, Forgotten(ordinal=7), {"state": State.PLANNED, "sample": None}),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, Row | dict) else "",
)  # fmt: skip
def test_a_change_alters_what_it_is_about(
    before: Row, change: Change, expected: dict[str, Any]
) -> None:
    assert only(fold(change, file=File(before))) == replace(before, **expected)


@pytest.mark.parametrize(
    "before",
    [
        IN_FLIGHT,
        only(fold(PLANNED, STORED, Forgotten(ordinal=7))),
        replace(only(fold(PLANNED, FAILED)), state=State.PLANNED, reason=None),  # reopened
    ],
    ids=["in flight", "forgotten", "failed"],
)
def test_a_row_that_gives_another_prompt_than_before_is_refused(before: Row) -> None:
    fold(PLANNED, file=File(before))
    with pytest.raises(PromptChanged, match=r"^row 7 \(line 3 of .*: 5 tokens then, 6 now\. The"):
        fold(Planned(origin=ORIGIN, prompt=OTHER_PROMPT), file=File(before))


@pytest.mark.parametrize(
    ("before", "change", "message"),
    [
        (None, Retried(ordinal=7, attempts=1), "Retried of row 7, which is not planned"),
        (None, STORED, "Stored of row 7, which is not planned"),
        (IN_FLIGHT, Forgotten(ordinal=7), "Forgotten of row 7, which is planned"),
        (IN_SHARD, PLANNED, "row 7 is settled already"),
        (IN_SHARD, STORED, "Stored of row 7, which is stored"),
        (IN_SHARD, Lost(ordinal=7, attempts=1), "Lost of row 7, which is stored"),
    ],
)
def test_what_does_not_follow_is_refused(before: Row | None, change: Change, message: str) -> None:
    with pytest.raises(IllegalTransition, match=message):
        fold(change, file=File(*filter(None, [before])))


def test_the_shards_of_a_batch_are_those_before_and_those_now() -> None:
    batch = fold(Relocated(ordinal=7, shard=5, offset=1), file=File(IN_SHARD))
    assert sorted(batch.shards) == [2, 5]
    assert fold(Forgotten(ordinal=7), file=File(IN_SHARD)).shards == [2]
    assert fold(Retried(ordinal=7, attempts=1), file=File(IN_FLIGHT)).shards == []


def test_only_rows_that_may_be_there_and_are_not_remembered_are_loaded() -> None:
    file = File(IN_FLIGHT)
    rows = RowCache(file.load, first_free=8)
    retried = Retried(ordinal=7, attempts=1)
    rows.forget_settled(rows.fold([retried, planned_at(8)]).rows)
    rows.forget_settled(rows.fold([retried, planned_at(9)]).rows)
    rows.forget_settled(rows.fold([STORED, planned_at(8)]).rows)
    assert file.asked == [[7]]
    with pytest.raises(IllegalTransition):  # it is settled, and so looked up
        rows.fold([planned_at(7), Forgotten(ordinal=7)])
    assert file.asked == [[7], [7]]


def test_the_remembered_rows_are_bounded() -> None:
    file = File()
    cache = RowCache(file.load, first_free=0, max_remembered=10)
    for ordinal in range(11):
        cache.forget_settled(cache.fold([planned_at(ordinal)]).rows)
    with pytest.raises(IllegalTransition):  # all were forgotten, and the file has none
        cache.fold([Retried(ordinal=3, attempts=1)])
    assert file.asked == [[3]]

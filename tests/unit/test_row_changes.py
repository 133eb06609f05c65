"""What batches of changes make of rows, without a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest

from manifest.exceptions import PromptChanged
from manifest.records import (
    Change,
    Failed,
    Forgotten,
    Moved,
    Planned,
    Rejected,
    Relocated,
    Stored,
)
from manifest.row_changes import Batch, Entry, Rows
from manifest.states import Event, IllegalTransition, Reason, State

PLANNED = Planned(
    ordinal=7, source=1, line=3, label='"a"', key="k", num_tokens=5, num_trained=2, part=1,
    alterations=("cut", "dropped"), detail="d",
)  # fmt: skip
STORED = Stored(ordinal=7, shard=2, offset=4096, size_bytes=10, digest="x", num_pieces=3)


def moved(event: Event, attempts: int = 1) -> Moved:
    return Moved(ordinal=7, event=event, attempts=attempts)


WAY = (PLANNED, moved(Event.SEND), moved(Event.DUMP), moved(Event.VERIFY), STORED)


class File:
    """What the rows are loaded from; says which were asked for."""

    def __init__(self, *entries: Entry) -> None:
        self._entries = {entry.ordinal: entry for entry in entries}
        self.asked: list[list[int]] = []

    def load(self, ordinals: Sequence[int]) -> list[Entry]:
        self.asked.append(list(ordinals))
        return [replace(self._entries[n]) for n in ordinals if n in self._entries]


def fold(*changes: Change, file: File | None = None) -> Batch:
    return Rows((file or File()).load, first_free=100 if file else 0).fold(changes)


def only(batch: Batch) -> Entry:
    (entry,) = batch.entries
    return entry


def differences(before: Entry, after: Entry) -> dict[str, Any]:
    then, now = asdict(before), asdict(after)
    return {name: now[name] for name in now if now[name] != then[name]}


def test_a_whole_life_in_one_batch_is_one_row() -> None:
    batch = fold(*WAY)
    assert only(batch) == Entry(
        ordinal=7, source=1, line=3, label='"a"', part=1, key="k", num_tokens=5, num_trained=2,
        alterations="cut,dropped", state=State.STORED, detail="d", attempts=1, shard=2, offset=4096,
        size_bytes=10, digest="x", num_pieces=3,
    )  # fmt: skip
    assert batch.shards == [2]


SENT = only(fold(*WAY[:2]))
IN_SHARD = only(fold(*WAY))


@pytest.mark.parametrize(
    ("before", "change", "expected"),
    [
        (SENT, moved(Event.DUMP, 2), {"state": State.DUMPED, "attempts": 2}),
        (SENT, moved(Event.LOSE), {"state": State.PLANNED, "num_deaths": 1}),
        (SENT, Failed(ordinal=7, reason=Reason.CACHED, detail="why", attempts=4),
         {"state": State.FAILED, "reason": Reason.CACHED, "detail": "why", "attempts": 4}),
        (SENT, replace(PLANNED, detail=None, alterations=(), line=99),
         {"state": State.PLANNED, "detail": None, "alterations": None}),
        (SENT, replace(PLANNED, key="other", num_tokens=4, num_trained=0,
                       alterations=("truncated",)),
         {"state": State.PLANNED, "key": "other", "num_tokens": 4, "num_trained": 0,
          "alterations": "truncated"}),
        (SENT, Rejected(ordinal=7, source=1, line=3, label=None, reason=Reason.TOO_LONG,
                        detail="why"),
         {"state": State.FAILED, "reason": Reason.TOO_LONG, "detail": "why"}),
        (IN_SHARD, Relocated(ordinal=7, shard=5, offset=1), {"shard": 5, "offset": 1}),
        (IN_SHARD, Forgotten(ordinal=7),
         {"state": State.PLANNED, **dict.fromkeys(
             ("shard", "offset", "size_bytes", "digest", "num_pieces"))}),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, Entry | dict) else "",
)  # fmt: skip
def test_a_change_alters_what_it_is_about(
    before: Entry, change: Change, expected: dict[str, Any]
) -> None:
    assert differences(before, only(fold(change, file=File(before)))) == expected


@pytest.mark.parametrize(
    "before",
    [
        SENT,
        only(fold(*WAY, Forgotten(ordinal=7))),
        only(fold(*WAY[:2], Failed(ordinal=7, reason=Reason.CACHED, detail="", attempts=4))),
    ],
    ids=["sent", "forgotten", "failed"],
)
def test_a_row_that_gives_another_prompt_than_before_is_refused(before: Entry) -> None:
    before = replace(before, state=State.PLANNED)  # the state that a resumed session finds
    fold(PLANNED, file=File(before))
    with pytest.raises(PromptChanged, match=r"^row 7 \(line 3 of .*: 5 tokens then, 6 now\. What"):
        fold(replace(PLANNED, key="other", num_tokens=6), file=File(before))


@pytest.mark.parametrize(
    ("before", "change", "message"),
    [
        (None, moved(Event.SEND), "send for row 7, which was never planned"),
        (None, STORED, "store for row 7, which was never planned"),
        (SENT, STORED, "no transition store from sent"),
        (SENT, Forgotten(ordinal=7), "no transition forget from sent"),
        (IN_SHARD, PLANNED, "row 7 is settled already"),
        (IN_SHARD, moved(Event.RETRY), "no transition retry from stored"),
    ],
)
def test_what_does_not_follow_is_refused(
    before: Entry | None, change: Change, message: str
) -> None:
    with pytest.raises(IllegalTransition, match=message):
        fold(change, file=File(*filter(None, [before])))


def test_the_shards_of_a_batch_are_those_before_and_those_now() -> None:
    batch = fold(Relocated(ordinal=7, shard=5, offset=1), file=File(IN_SHARD))
    assert sorted(batch.shards) == [2, 5]
    assert fold(Forgotten(ordinal=7), file=File(IN_SHARD)).shards == [2]
    assert fold(moved(Event.DUMP), file=File(SENT)).shards == []


def test_only_rows_that_may_be_there_and_are_not_remembered_are_loaded() -> None:
    file = File(SENT)
    rows = Rows(file.load, first_free=8)
    rows.forget_settled(rows.fold([moved(Event.DUMP), replace(PLANNED, ordinal=8)]).entries)
    rows.forget_settled(rows.fold([moved(Event.VERIFY), replace(PLANNED, ordinal=9)]).entries)
    rows.forget_settled(rows.fold([STORED, replace(PLANNED, ordinal=8)]).entries)
    assert file.asked == [[7]]
    with pytest.raises(IllegalTransition):  # it was settled, and so is looked up
        rows.fold([replace(PLANNED, ordinal=7), moved(Event.DUMP)])
    assert file.asked == [[7], [7]]

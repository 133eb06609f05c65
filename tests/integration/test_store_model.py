"""The real store against a small model: any sequence of changes, closing and opening."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

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
    Shard,
    Source,
    SourceRow,
    Stored,
    StoredSample,
)
from manifest.states import IllegalTransition, Reason, State
from manifest.store import Store

pytestmark = pytest.mark.slow

ROWS = 6
SIZE = 100
REASONS = st.sampled_from([Reason.CACHED, Reason.NONFINITE, Reason.KILLS_SERVER])


def opened(path: Path) -> Store:
    """A store that does not wait for the disk: nothing here is about a crash."""
    store = Store.create_or_open(path)
    store._db.execute("PRAGMA synchronous = OFF")
    return store


def origin(ordinal: int) -> SourceRow:
    return SourceRow(ordinal=ordinal, source=0, line=1)


def sample_at(shard: int, offset: int) -> StoredSample:
    return StoredSample(
        shard=shard, offset=offset, size_bytes=SIZE, digest=f"x{offset}", num_pieces=1
    )


@dataclass
class Known:
    """What the model knows of one row."""

    state: State
    num_tokens: int | None
    reason: Reason | None = None
    attempts: int = 0
    deaths: int = 0
    place: tuple[int, int] | None = None  # shard, offset
    has_key: bool = True


class StoreMachine(RuleBasedStateMachine):
    """Every change that the table allows is made, every other one refused and without effect."""

    @initialize()
    def open(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self.path = Path(self._directory.name) / "m.sqlite"
        self.rows: dict[int, Known] = {}
        self.sealed = {0: False, 1: False}
        self.next_offset = 4096
        self.store = opened(self.path)
        source = Source(number=0, path="p", size_bytes=1, digest="d", num_rows=ROWS)
        self.store.begin({"model": "m"}, [source])
        for number in self.sealed:
            self.store.add_shard(
                Shard(
                    number=number, data_start=4096, is_sealed=False, size_bytes=4096, num_samples=0
                )
            )

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self._directory.cleanup()

    def change(self, change: Any, *, is_allowed: bool) -> bool:
        try:
            self.store.apply([change])
        except (IllegalTransition, PromptChanged):
            assert not is_allowed, change
            return False
        assert is_allowed, change
        return True

    def is_in(self, state: State, ordinal: int) -> bool:
        return ordinal in self.rows and self.rows[ordinal].state is state

    @rule(ordinal=st.integers(0, ROWS - 1), num_tokens=st.integers(1, 9))
    def plan(self, ordinal: int, num_tokens: int) -> None:
        known = self.rows.get(ordinal)
        change = Planned(
            origin=origin(ordinal),
            prompt=PromptFacts(
                key=f"k{num_tokens}", num_tokens=num_tokens, num_trained=num_tokens % 2
            ),
        )
        is_same = known is None or not known.has_key or known.num_tokens == num_tokens
        is_allowed = known is None or not known.state.is_terminal
        if self.change(change, is_allowed=is_allowed and is_same):
            known = self.rows.setdefault(ordinal, Known(State.PLANNED, num_tokens))
            known.state, known.num_tokens, known.has_key = State.PLANNED, num_tokens, True

    @rule(ordinal=st.integers(0, ROWS - 1))
    def reject(self, ordinal: int) -> None:
        known = self.rows.get(ordinal)
        change = Rejected(origin=origin(ordinal), reason=Reason.BAD_JSON, detail="")
        if self.change(change, is_allowed=known is None or not known.state.is_terminal):
            known = self.rows.setdefault(ordinal, Known(State.FAILED, None, has_key=False))
            known.state, known.reason = State.FAILED, Reason.BAD_JSON

    @rule(
        ordinal=st.integers(0, ROWS - 1),
        is_death=st.booleans(),
    )
    def fail_an_attempt(self, ordinal: int, is_death: bool) -> None:
        attempts = self.rows[ordinal].attempts + 1 if ordinal in self.rows else 1
        change = (Lost if is_death else Retried)(ordinal=ordinal, attempts=attempts)
        if self.change(change, is_allowed=self.is_in(State.PLANNED, ordinal)):
            self.rows[ordinal].attempts = attempts
            self.rows[ordinal].deaths += is_death

    @rule(ordinal=st.integers(0, ROWS - 1), shard=st.sampled_from([0, 1]))
    def store_sample(self, ordinal: int, shard: int) -> None:
        known = self.rows.get(ordinal)
        is_allowed = self.is_in(State.PLANNED, ordinal)
        if known is not None and not known.has_key:
            return  # a row that gave no prompt is planned again before anything else
        attempts = 1 if known is None else known.attempts + 1
        sample = sample_at(shard, self.next_offset)
        change = Stored(ordinal=ordinal, sample=sample, attempts=attempts)
        if self.change(change, is_allowed=is_allowed):
            assert known is not None
            known.state, known.place = State.STORED, (shard, self.next_offset)
            known.attempts = attempts
            self.next_offset += SIZE

    @rule(ordinal=st.integers(0, ROWS - 1), shard=st.sampled_from([0, 1]))
    def relocate(self, ordinal: int, shard: int) -> None:
        change = Relocated(ordinal=ordinal, shard=shard, offset=self.next_offset)
        if self.change(change, is_allowed=self.is_in(State.STORED, ordinal)):
            self.rows[ordinal].place = (shard, self.next_offset)
            self.next_offset += SIZE

    @rule(ordinal=st.integers(0, ROWS - 1), reason=REASONS)
    def fail(self, ordinal: int, reason: Reason) -> None:
        attempts = self.rows[ordinal].attempts if ordinal in self.rows else 0
        change = Failed(ordinal=ordinal, reason=reason, detail="", attempts=attempts)
        if self.change(change, is_allowed=self.is_in(State.PLANNED, ordinal)):
            self.rows[ordinal].state, self.rows[ordinal].reason = State.FAILED, reason

    @rule(ordinal=st.integers(0, ROWS - 1))
    def forget(self, ordinal: int) -> None:
        change = Forgotten(ordinal=ordinal)
        if self.change(change, is_allowed=self.is_in(State.STORED, ordinal)):
            self.rows[ordinal].state, self.rows[ordinal].place = State.PLANNED, None

    @rule(ordinal=st.integers(0, ROWS - 1))
    @precondition(lambda self: any(row.place for row in self.rows.values()))
    def lose_bytes(self, ordinal: int) -> None:
        known = self.rows.get(ordinal)
        if known is None or known.place is None:
            return
        self.sealed[known.place[0]] = False
        self.store.forget_stored([ordinal])
        known.state, known.place = State.PLANNED, None

    @rule(number=st.sampled_from([0, 1]))
    def seal(self, number: int) -> None:
        self.store.seal_shard(number, "d")
        self.sealed[number] = True

    @rule()
    def reopen_failed(self) -> None:
        failed = [row for row in self.rows.values() if row.state is State.FAILED]
        assert self.store.reopen_failed() == len(failed)
        for row in failed:
            row.state, row.reason, row.deaths = State.PLANNED, None, 0

    @rule()
    def close_and_open(self) -> None:
        self.store.close()
        self.store = opened(self.path)

    @invariant()
    def rows_are_as_the_model_has_them(self) -> None:
        if not hasattr(self, "store"):
            return
        found = {row.ordinal: row for row in self.store.rows()}
        assert {
            n: (row.state, row.reason, row.attempts, row.num_deaths,
                row.prompt and row.prompt.num_tokens,
                row.sample and (row.sample.shard, row.sample.offset))
            for n, row in found.items()
        } == {
            n: (row.state, row.reason, row.attempts, row.deaths, row.num_tokens, row.place)
            for n, row in self.rows.items()
        }  # fmt: skip

    @invariant()
    def every_count_is_that_of_the_rows(self) -> None:
        if not hasattr(self, "store"):
            return
        rows = self.rows.values()
        totals = self.store.totals()
        assert totals.by_state == Counter(row.state for row in rows)
        assert totals.by_reason == Counter(row.reason for row in rows if row.reason)
        stored = [row for row in rows if row.state is State.STORED]
        assert totals.stored_tokens == sum(row.num_tokens or 0 for row in stored)
        assert totals.stored_bytes == SIZE * len(stored)
        assert self.store.integrity_problems() == []
        settled = {n for begin, end in self.store.settled_ranges() for n in range(begin, end)}
        assert settled == {n for n, row in self.rows.items() if row.state.is_terminal}
        unfinished = {n: row for n, row in self.rows.items() if not row.state.is_terminal}
        assert self.store.attempts() == {n: r.attempts for n, r in unfinished.items() if r.attempts}
        assert self.store.suspects() == {n: r.deaths for n, r in unfinished.items() if r.deaths}

    @invariant()
    def shards_end_where_their_samples_do(self) -> None:
        if not hasattr(self, "store"):
            return
        for shard in self.store.shards():
            places = [row.place for row in self.rows.values() if row.place]
            offsets = [offset for number, offset in places if number == shard.number]
            assert shard.num_samples == len(offsets)
            assert shard.size_bytes == max((end + SIZE for end in offsets), default=4096)
            assert shard.is_sealed == self.sealed[shard.number]
            assert len(self.store.shard_rows(shard.number)) == len(offsets)


StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStoreMachine = StoreMachine.TestCase


# --- batches --------------------------------------------------------------------------------------


MAY_FOLLOW = {
    None: ["plan", "plan", "reject"],
    State.PLANNED: ["plan", "retry", "lose", "store", "fail"],
    State.STORED: ["move", "forget"],
}


@st.composite
def histories(draw: st.DrawFn) -> list[Change]:
    """Changes that follow from one another, of a few rows in any order."""
    states: dict[int, State] = {}
    changes: list[Change] = []
    for at in range(draw(st.integers(1, 40))):
        n = draw(st.integers(0, 3))
        state = states.get(n)
        if state is State.FAILED:
            continue
        event = draw(st.sampled_from(MAY_FOLLOW[state]))
        change: Change
        if event == "plan":
            prompt = PromptFacts(
                key=f"k{n}", num_tokens=at, num_trained=at % 2, alterations=("a", "b")[: at % 3]
            )
            change = Planned(origin=origin(n), prompt=prompt, detail=f"d{at}")
            states[n] = State.PLANNED
        elif event == "reject":
            change = Rejected(origin=origin(n), reason=Reason.BAD_JSON, detail="")
            states[n] = State.FAILED
        else:
            sample = sample_at(at % 2, 4096 + SIZE * at)
            states[n] = {"store": State.STORED, "move": State.STORED, "fail": State.FAILED}.get(
                event, State.PLANNED
            )
            if event == "store":
                change = Stored(ordinal=n, sample=sample, attempts=at)
            elif event == "move":
                change = Relocated(ordinal=n, shard=sample.shard, offset=sample.offset)
            elif event == "forget":
                change = Forgotten(ordinal=n)
            elif event == "fail":
                change = Failed(ordinal=n, reason=draw(REASONS), detail=f"d{at}", attempts=at)
            else:
                change = (Lost if event == "lose" else Retried)(ordinal=n, attempts=at)
        changes.append(change)
    return changes


def begun(path: Path) -> Store:
    store = opened(path)
    store.begin({}, [Source(number=0, path="p", size_bytes=1, digest="d", num_rows=ROWS)])
    for number in (0, 1):
        store.add_shard(
            Shard(number=number, data_start=4096, is_sealed=False, size_bytes=4096, num_samples=0)
        )
    return store


def everything(store: Store) -> Any:
    assert store.integrity_problems() == []
    return list(store.rows()), store.totals(), store.shards(), store.suspects(), store.attempts()


@settings(max_examples=150, deadline=None)
@given(history=histories(), data=st.data())
def test_a_batch_comes_to_the_same_as_its_changes_one_by_one(
    history: list[Change], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        single, batched = (begun(Path(directory) / name) for name in ("single", "batched"))
        begin = 0
        while begin < len(history):
            end = data.draw(st.integers(begin + 1, len(history)))
            batch = history[begin:end]
            for change in batch:
                single.apply([change])
            if data.draw(st.booleans()):  # a batch that is refused leaves nothing behind
                never = Retried(ordinal=ROWS, attempts=1)
                with pytest.raises(IllegalTransition):
                    batched.apply([*batch, never])
            if data.draw(st.booleans()):  # nothing is remembered of the rows
                batched.close()
                batched = opened(batched.path)
            batched.apply(batch)
            assert everything(batched) == everything(single)
            begin = end
        single.close()
        batched.close()

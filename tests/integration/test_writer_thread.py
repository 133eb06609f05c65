"""The manifest's writer thread: batched commits, and nothing after a gap."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from manifest.exceptions import ManifestError, ManifestSpaceError
from manifest.records import Change, Planned, PromptFacts, Retried, Source, SourceRow
from manifest.states import IllegalTransition
from manifest.store import Store
from manifest.writer_thread import CommitBounds, StoreOwner


def planned(ordinal: int) -> Planned:
    return Planned(
        origin=SourceRow(ordinal=ordinal, source=0, line=1),
        prompt=PromptFacts(key=str(ordinal), num_tokens=1, num_trained=0),
    )


@pytest.fixture
def bounds() -> CommitBounds:
    return CommitBounds()


@pytest.fixture
async def owner(tmp_path: Path, bounds: CommitBounds) -> AsyncIterator[StoreOwner]:
    owner = await StoreOwner.open(tmp_path / "manifest.sqlite", bounds)
    source = Source(number=0, path="p", size_bytes=1, digest="d", num_rows=1)
    await owner.call(lambda store: store.begin({"model": "m"}, [source]))
    yield owner
    try:
        await owner.close()
    except Exception:
        pass


class Gate:
    """Holds the owner's commits back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[int] = []
        self._reached = threading.Event()
        self._open = threading.Event()
        real = Store.apply

        def apply(store: Store, changes: list[Change]) -> None:
            self.batches.append(len(changes))
            self._reached.set()
            assert self._open.wait(30)
            real(store, changes)

        monkeypatch.setattr(Store, "apply", apply)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, 30)

    def open(self) -> None:
        self._open.set()


async def test_what_is_posted_during_a_commit_shares_the_next(
    owner: StoreOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    first = asyncio.create_task(owner.commit(planned(0)))
    await gate.reached()
    rest = [asyncio.create_task(owner.commit(planned(n))) for n in range(1, 50)]
    await asyncio.sleep(0)
    assert not first.done()
    gate.open()
    await asyncio.gather(first, *rest)
    assert gate.batches == [1, 49]
    assert owner.commits.count == 2
    assert (owner.commits.changes, owner.commits.largest) == (50, 49)
    assert len(await owner.call(lambda store: list(store.rows()))) == 50


@pytest.mark.parametrize("bounds", [CommitBounds(linger_s=3600)])
async def test_what_nobody_waits_for_joins_the_next_commit(
    owner: StoreOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    gate.open()
    for ordinal in range(3):
        owner.post(planned(ordinal), Retried(ordinal=ordinal, attempts=1))
        await asyncio.sleep(0)
    assert gate.batches == []
    await owner.commit(planned(3))
    assert gate.batches == [7]


@pytest.mark.parametrize("bounds", [CommitBounds(linger_s=0.001)])
async def test_what_nobody_waits_for_is_written_by_itself_soon(
    owner: StoreOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    owner.post(planned(0))
    await gate.reached()
    assert gate.batches == [1]
    gate.open()
    assert len(await owner.call(lambda store: list(store.rows()))) == 1


@pytest.mark.parametrize("bounds", [CommitBounds(linger_s=3600, max_changes=3)])
async def test_many_posted_changes_do_not_wait(
    owner: StoreOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    owner.post(planned(0), planned(1))
    owner.post(planned(2))
    await gate.reached()
    assert gate.batches == [3]
    gate.open()


@pytest.mark.parametrize("bounds", [CommitBounds(linger_s=3600)])
async def test_what_is_posted_during_a_commit_waits_for_company_too(
    owner: StoreOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    first = asyncio.create_task(owner.commit(planned(0)))
    await gate.reached()
    owner.post(planned(1))
    gate.open()
    await first
    assert gate.batches == [1]
    await owner.drain()
    assert gate.batches == [1, 1]


@pytest.mark.parametrize("bounds", [CommitBounds(max_changes=20)])
async def test_a_commit_has_a_bound(owner: StoreOwner) -> None:
    await owner.commit(*(planned(n) for n in range(50)))
    assert (owner.commits.count, owner.commits.largest) == (3, 20)
    assert 0 < owner.commits.slowest_s <= owner.commits.seconds
    assert len(await owner.call(lambda store: list(store.rows()))) == 50


async def test_a_commit_returns_only_when_its_changes_are_durable(
    owner: StoreOwner, tmp_path: Path
) -> None:
    await owner.commit(planned(0))
    reader = Store.open_read_only(tmp_path / "manifest.sqlite")
    assert [row.ordinal for row in reader.rows()] == [0]
    reader.close()


async def test_a_call_sees_what_was_posted_before(owner: StoreOwner) -> None:
    for ordinal in range(20):
        owner.post(planned(ordinal))
    owner.post(Retried(ordinal=3, attempts=5))
    rows = await owner.call(lambda store: list(store.rows()))
    assert len(rows) == 20
    assert rows[3].attempts == 5


async def test_nothing_is_written_after_a_failed_commit(owner: StoreOwner) -> None:
    await owner.commit(planned(0))
    with pytest.raises(IllegalTransition):
        await owner.commit(Retried(ordinal=9, attempts=1))
    with pytest.raises(IllegalTransition):
        owner.post(planned(1))
    with pytest.raises(IllegalTransition):
        await owner.commit(planned(2))
    with pytest.raises(IllegalTransition):
        await owner.call(lambda store: store.totals())
    with pytest.raises(IllegalTransition):
        await owner.drain()


async def test_a_batch_that_was_filled_while_another_failed_is_not_written(
    owner: StoreOwner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gate = Gate(monkeypatch)
    bad = asyncio.create_task(owner.commit(Retried(ordinal=9, attempts=1)))
    await gate.reached()
    behind = asyncio.create_task(owner.commit(planned(1)))
    await asyncio.sleep(0)
    gate.open()
    results = await asyncio.gather(bad, behind, return_exceptions=True)
    assert [type(result) for result in results] == [IllegalTransition] * 2
    assert gate.batches == [1]
    reader = Store.open_read_only(tmp_path / "manifest.sqlite")
    assert list(reader.rows()) == []
    reader.close()


async def test_whoever_waits_for_a_failed_batch_is_told(
    owner: StoreOwner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(store: Store, changes: list[Change]) -> None:
        raise ManifestSpaceError("full")

    monkeypatch.setattr(Store, "apply", full)
    results = await asyncio.gather(
        *(owner.commit(planned(n)) for n in range(5)), return_exceptions=True
    )
    assert {type(result) for result in results} == {ManifestSpaceError}
    with pytest.raises(ManifestSpaceError):
        await owner.close()
    reader = Store.open_read_only(tmp_path / "manifest.sqlite")
    assert list(reader.rows()) == []
    reader.close()


async def test_a_waiter_that_is_cancelled_does_not_stop_the_commit(
    owner: StoreOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    waiting = asyncio.create_task(owner.commit(planned(0)))
    await gate.reached()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.open()
    rows = await owner.call(lambda store: list(store.rows()))
    assert [row.ordinal for row in rows] == [0]


async def test_closing_commits_what_was_posted(tmp_path: Path) -> None:
    owner = await StoreOwner.open(tmp_path / "m.sqlite")
    source = Source(number=0, path="p", size_bytes=1, digest="d", num_rows=1)
    await owner.call(lambda store: store.begin({}, [source]))
    owner.post(planned(0))
    await owner.close()
    reader = Store.open_read_only(tmp_path / "m.sqlite")
    assert len(list(reader.rows())) == 1
    reader.close()


async def test_a_file_that_cannot_be_opened_leaves_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    with pytest.raises(ManifestError):
        await StoreOwner.open(tmp_path / "nowhere" / "m.sqlite")
    for thread in threading.enumerate():
        if thread.name.startswith("manifest"):
            thread.join(10)
    assert threading.active_count() <= before

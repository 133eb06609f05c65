"""The one thread that owns the manifest, for asyncio callers: batched commits.

A commit begins when somebody waits for one, and takes along all that was posted until then. What
nobody waits for (that a row is planned, sent or dumped: a crash before it is written costs that the
row is read or sent again, as it is after a crash anyway) waits for such a commit too, but not for
long, so that other processes see a live manifest. Changes made while a commit is under way join the
next one: a slow disk makes larger batches. A batch has an upper bound, so that a commit's time and
what a crash can cost have one too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from manifest.records import Change
from manifest.store import Store

Result = TypeVar("Result")

#: Most changes of one commit: some 10 ms of work beside its fsync.
MAX_BATCH = 1000
#: Longest that posted changes wait for company.
LINGER_S = 0.2


@dataclass(kw_only=True)
class Commits:
    """What group commit did, measured."""

    count: int = 0
    changes: int = 0
    largest: int = 0  # changes of one commit
    seconds: float = 0.0  # within commits, fsync included
    slowest_s: float = 0.0

    def add(self, changes: int, seconds: float) -> None:
        self.count += 1
        self.changes += changes
        self.largest = max(self.largest, changes)
        self.seconds += seconds
        self.slowest_s = max(self.slowest_s, seconds)

    def to_document(self) -> dict[str, float]:
        return {
            "count": self.count,
            "changes": self.changes,
            "largest": self.largest,
            "mean_ms": 1e3 * self.seconds / max(1, self.count),
            "slowest_ms": 1e3 * self.slowest_s,
        }


class StoreOwner:
    """Runs every call on the store's own thread, one after another.

    `post` notes a change and returns at once, and it is durable within LINGER_S and the time of two
    commits; `commit` returns when its changes, and all that
    were posted before, are durable. A failed commit is raised by every call that waits for it and
    by every later one: nothing is written after a gap.
    """

    def __init__(self, executor: ThreadPoolExecutor, store: Store) -> None:
        self._executor = executor
        self._store = store
        self._batch: list[Change] = []
        self._batch_done: asyncio.Future[None] | None = None  # of the batch still being filled
        self._is_due = False  # whether that batch is to be committed as soon as can be
        self._linger: asyncio.TimerHandle | None = None  # makes it due
        self._last_done: asyncio.Future[None] | None = None  # of the newest batch begun
        self._committer: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self.commits = Commits()

    @classmethod
    async def open(cls, path: Path) -> StoreOwner:
        executor = ThreadPoolExecutor(1, thread_name_prefix="manifest")
        try:
            store = await asyncio.get_running_loop().run_in_executor(
                executor, Store.create_or_open, path
            )
        except BaseException:
            executor.shutdown(wait=False)
            raise
        return cls(executor, store)

    async def call(self, function: Callable[[Store], Result]) -> Result:
        """Run `function(store)` on the owner thread, after all that was posted before."""
        await self.drain()
        return await self._run(function)

    def post(self, *changes: Change) -> None:
        """Note changes; they become durable with one of the next commits, in this order."""
        self._check()
        self._batch.extend(changes)
        if self._batch_done is None:
            loop = asyncio.get_running_loop()
            self._batch_done = self._last_done = loop.create_future()
            self._linger = loop.call_later(LINGER_S, self._hurry)
        if len(self._batch) >= MAX_BATCH:
            self._hurry()

    async def commit(self, *changes: Change) -> None:
        """Return once `changes` and everything posted before them are durable."""
        self.post(*changes)
        await self.drain()

    async def drain(self) -> None:
        """Return once everything posted so far is durable."""
        if self._batch_done is not None:
            self._hurry()
        if self._last_done is not None:
            await asyncio.shield(self._last_done)
        self._check()

    async def close(self) -> None:
        """Commit what was posted and close the file. Raises what a commit raised."""
        try:
            await self.drain()
        finally:
            await self._run(Store.close)
            self._executor.shutdown(wait=True)

    async def _run(self, function: Callable[[Store], Result]) -> Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, function, self._store)

    def _hurry(self) -> None:
        """Commit what was posted as soon as the commit under way, if any, is done."""
        self._is_due = True
        if self._committer is None:
            self._committer = asyncio.create_task(self._commit_batches(), name="manifest-commit")

    async def _commit_batches(self) -> None:
        while self._is_due and self._batch_done is not None:
            batch, done, linger = self._batch, self._batch_done, self._linger
            self._batch, self._batch_done, self._linger = [], None, None
            self._is_due = False
            if linger is not None:
                linger.cancel()
            for start in range(0, len(batch), MAX_BATCH):
                if self._failure is None:
                    await self._commit_one(batch[start : start + MAX_BATCH])
            done.set_result(None)
        self._committer = None

    async def _commit_one(self, changes: list[Change]) -> None:
        began = time.monotonic()
        try:
            await self._run(lambda store: store.apply(changes))
        except Exception as error:
            # Kept, not raised: every waiter and every later call gets it from _check.
            self._failure = error
        else:
            self.commits.add(len(changes), time.monotonic() - began)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

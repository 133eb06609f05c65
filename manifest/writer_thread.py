"""Writes the manifest in group commits, on one thread, for asyncio callers.

A commit starts when a caller waits for one, and includes everything posted until then. Changes that
no caller waits for (a row is planned or retried) wait briefly for such a commit, so that other
processes see the progress. Those posted during a commit join the next one: a slow disk makes larger
commits, of bounded size.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from manifest.records import Change
from manifest.store import Store
from server_patch.settings import DEFAULT_FILE_MODE

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class CommitBounds:
    """The bounds of group commits."""

    max_changes: int = 1000  # in one commit: about 10 ms of work besides its fsync
    linger_s: float = 0.2  # for which posted changes wait for more


DEFAULT_BOUNDS = CommitBounds()


@dataclass(kw_only=True)
class Commits:
    """Measurements of all group commits."""

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


@dataclass(eq=False, kw_only=True)
class _Pending:
    """The posted changes that no commit has taken yet."""

    changes: list[Change] = field(default_factory=list)
    done: asyncio.Future[None]
    linger: asyncio.TimerHandle  # makes them due
    is_due: bool = False  # to be committed as soon as possible


class StoreOwner:
    """Owns the store and its thread, on which every call runs, one after another.

    Posted changes are durable within the linger time and two commits. A failed commit is raised by
    every call that waits for it and by every later call: nothing is written after a gap.
    """

    def __init__(self, executor: ThreadPoolExecutor, store: Store, bounds: CommitBounds) -> None:
        self._executor = executor
        self._store = store
        self._bounds = bounds
        self._pending: _Pending | None = None
        self._last_done: asyncio.Future[None] | None = None  # of the newest changes
        self._committer: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self.commits = Commits()

    @classmethod
    async def open(
        cls,
        path: Path,
        bounds: CommitBounds = DEFAULT_BOUNDS,
        *,
        file_mode: int = DEFAULT_FILE_MODE,
    ) -> StoreOwner:
        """Open or create the manifest. Raises ManifestError."""
        executor = ThreadPoolExecutor(1, thread_name_prefix="manifest")
        try:
            store = await asyncio.get_running_loop().run_in_executor(
                executor, partial(Store.create_or_open, path, file_mode=file_mode)
            )
        except BaseException:
            executor.shutdown(wait=False)
            raise
        return cls(executor, store, bounds)

    async def call(self, function: Callable[[Store], Result]) -> Result:
        """Run `function(store)` on the store's thread, after all earlier changes are durable."""
        await self.drain()
        return await self._run(function)

    def post(self, *changes: Change) -> None:
        """Queue changes, which become durable with one of the next commits, in this order."""
        self._check()
        if self._pending is None:
            loop = asyncio.get_running_loop()
            self._last_done = loop.create_future()
            linger = loop.call_later(self._bounds.linger_s, self._hurry)
            self._pending = _Pending(done=self._last_done, linger=linger)
        self._pending.changes += changes
        if len(self._pending.changes) >= self._bounds.max_changes:
            self._hurry()

    async def commit(self, *changes: Change) -> None:
        """Return once `changes` and everything posted before them are durable."""
        self.post(*changes)
        await self.drain()

    async def drain(self) -> None:
        """Return once everything posted so far is durable."""
        self._hurry()
        if self._last_done is not None:
            await asyncio.shield(self._last_done)
        self._check()

    async def close(self) -> None:
        """Commit the posted changes and close the file. Raises the error of a failed commit."""
        try:
            await self.drain()
        finally:
            await self._run(Store.close)
            self._executor.shutdown(wait=True)

    async def _run(self, function: Callable[[Store], Result]) -> Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, function, self._store)

    def _hurry(self) -> None:
        """Commit the pending changes as soon as the running commit, if any, is done."""
        if self._pending is None:
            return
        self._pending.is_due = True
        if self._committer is None:
            self._committer = asyncio.create_task(self._commit_due(), name="manifest-commit")

    async def _commit_due(self) -> None:
        size = self._bounds.max_changes
        while (pending := self._pending) is not None and pending.is_due:
            self._pending = None
            pending.linger.cancel()
            for start in range(0, len(pending.changes), size):
                if self._failure is None:
                    await self._commit_one(pending.changes[start : start + size])
            pending.done.set_result(None)
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

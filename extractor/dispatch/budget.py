"""Admission by weight: a fair semaphore whose permits are bytes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class Budget:
    """At most `total` are held at any time.

    First come, first served, so that a large prompt is not starved by small ones. A weight over
    the total is the caller's mistake (ValueError): it would wait for ever.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self.peak = 0
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    @asynccontextmanager
    async def hold(self, weight: int) -> AsyncIterator[None]:
        """Hold `weight` for the length of the block; waits until they are free."""
        if weight > self.total:
            raise ValueError(f"{weight} can never fit into {self.total}")
        await self._acquire(weight)
        try:
            yield
        finally:
            self.used -= weight
            self._wake()

    async def _acquire(self, weight: int) -> None:
        if not self._waiters and self.used + weight <= self.total:
            self._take(weight)
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((weight, granted))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.used -= weight  # granted in the moment we were cancelled
            else:
                with suppress(ValueError):  # _wake may have dropped it already
                    self._waiters.remove((weight, granted))
            self._wake()
            raise

    def _wake(self) -> None:
        while self._waiters and self.used + self._waiters[0][0] <= self.total:
            weight, granted = self._waiters.popleft()
            if not granted.done():
                self._take(weight)
                granted.set_result(None)

    def _take(self, weight: int) -> None:
        self.used += weight
        self.peak = max(self.peak, self.used)

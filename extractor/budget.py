"""Admission by bytes: a fair semaphore whose permits have weights."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class ByteBudget:
    """At most `total_bytes` are held at any time.

    First come, first served, so that a large prompt is not starved by small ones. A weight over
    the total is the caller's mistake (ValueError): it would wait for ever.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def hold(self, size_bytes: int) -> AsyncIterator[None]:
        """Hold `size_bytes` for the length of the block; waits until they are free."""
        if size_bytes > self.total_bytes:
            raise ValueError(f"{size_bytes} bytes can never fit into {self.total_bytes}")
        await self._acquire(size_bytes)
        try:
            yield
        finally:
            self.used_bytes -= size_bytes
            self._wake()

    async def _acquire(self, size_bytes: int) -> None:
        if not self._waiters and self.used_bytes + size_bytes <= self.total_bytes:
            self._take(size_bytes)
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((size_bytes, granted))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.used_bytes -= size_bytes  # granted in the moment we were cancelled
            else:
                with suppress(ValueError):  # _wake may have dropped it already
                    self._waiters.remove((size_bytes, granted))
            self._wake()
            raise

    def _wake(self) -> None:
        while self._waiters and self.used_bytes + self._waiters[0][0] <= self.total_bytes:
            size_bytes, granted = self._waiters.popleft()
            if not granted.done():
                self._take(size_bytes)
                granted.set_result(None)

    def _take(self, size_bytes: int) -> None:
        self.used_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

"""Bounds the bytes of dumps under the dump root: a fair semaphore whose permits are bytes.

A prompt holds its bytes until it is settled, so this also bounds the prompts in progress.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from extractor.core.timings import DEFAULT_TIMINGS

#: Bytes, holders, and a future of both.
_Waiter = tuple[int, int, asyncio.Future[None]]


def max_prompts(
    request_limit: int, *, group_samples: int = DEFAULT_TIMINGS.store.group_samples
) -> int:
    """Most prompts in progress where the servers take `request_limit` requests in all.

    A prompt outlives its request by the copy to the shard; twice as many prompts as requests keep
    the servers busy meanwhile. The samples of one group, which become durable at once, need not
    wait for each other.

    >>> max_prompts(32, group_samples=256)
    320
    """
    return 2 * request_limit + group_samples


class Budget:
    """At most `total` bytes are held at any time, by at most `max_holders` prompts, first come,
    first served, so that a large prompt is not starved by small ones.

    Prompts that lent their bytes come before new ones: they are holders already, and a new one may
    be waiting for one of them to end."""

    def __init__(self, total: int, *, max_holders: int) -> None:
        self.total = total
        self.max_holders = max_holders
        self.used = 0
        self.peak = 0
        self.num_holders = 0
        self._returning: deque[_Waiter] = deque()
        self._new: deque[_Waiter] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._returning) + len(self._new)

    async def take(self, size_bytes: int) -> None:
        """Wait until `size_bytes` are free, and hold them until `give_back`.

        Raises ValueError for more than the total, which would wait forever.
        """
        if size_bytes > self.total:
            raise ValueError(f"{size_bytes} can never fit into {self.total}")
        await self._acquire(size_bytes, 1)

    def give_back(self, size_bytes: int) -> None:
        """Free what `take` held."""
        self._release(size_bytes, 1)

    @asynccontextmanager
    async def lent(self, size_bytes: int) -> AsyncIterator[None]:
        """Free held bytes within the block, and wait for them at its end."""
        self._release(size_bytes, 0)
        try:
            yield
            await self._acquire(size_bytes, 0)
        except BaseException:
            self.used += size_bytes  # the caller gives them back
            raise

    async def _acquire(self, size_bytes: int, num_holders: int) -> None:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._new if num_holders else self._returning
        waiter = (size_bytes, num_holders, granted)
        waiting.append(waiter)
        self._wake()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self._release(size_bytes, num_holders)  # granted at the moment of the cancellation
            else:
                with suppress(ValueError):  # _wake may have dropped it already
                    waiting.remove(waiter)
                self._wake()
            raise

    def _release(self, size_bytes: int, num_holders: int) -> None:
        self.used -= size_bytes
        self.num_holders -= num_holders
        self._wake()

    def _fits(self, size_bytes: int, num_holders: int) -> bool:
        has_room = self.used + size_bytes <= self.total
        return has_room and self.num_holders + num_holders <= self.max_holders

    def _wake(self) -> None:
        for waiting in (self._returning, self._new):
            while waiting and self._fits(*waiting[0][:2]):
                size_bytes, num_holders, granted = waiting.popleft()
                if not granted.done():
                    self.used += size_bytes
                    self.num_holders += num_holders
                    self.peak = max(self.peak, self.used)
                    granted.set_result(None)
            if waiting:
                return

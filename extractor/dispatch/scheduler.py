"""Hands each prompt a slot of the least-loaded server, first come, first served.

Each server has a lane. Its health bounds the requests in flight there. A suspect (suspects.py)
takes a whole lane: one lane is kept for suspects while there are any, and nothing else is sent
there until each of them, one at a time, is answered.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from extractor.dispatch.health import Health


@dataclass(eq=False, kw_only=True)
class Lane:
    """The requests in flight with one server."""

    health: Health
    num_in_flight: int = 0
    num_tokens: int = 0  # of the prompts in flight
    is_taken_whole: bool = False  # by a suspect

    @property
    def has_room(self) -> bool:
        """Whether one more prompt may be sent now."""
        return not self.is_taken_whole and self.num_in_flight < self.health.limit


@dataclass(eq=False, kw_only=True)
class Slot:
    """The right to send one prompt to one server, until it is released."""

    lane: Lane
    num_tokens: int
    is_alone: bool
    _wake: Callable[[], None]
    _is_released: bool = False

    def release(self) -> None:
        """The server has answered, or never will. Releasing again does nothing."""
        if not self._is_released:
            self._is_released = True
            self.lane.num_in_flight -= 1
            self.lane.num_tokens -= self.num_tokens
            self.lane.is_taken_whole = False if self.is_alone else self.lane.is_taken_whole
            self._wake()


@dataclass(eq=False, kw_only=True)
class _Waiter:
    ordinal: int
    num_tokens: int
    granted: asyncio.Future[Slot | None]


class Scheduler:
    """Hands out slots of several lanes."""

    def __init__(self, is_suspect: Callable[[int], bool] = lambda ordinal: False) -> None:
        """`is_suspect`: whether the prompt of a row must be sent alone."""
        self.lanes: list[Lane] = []
        self.is_closed = False
        self._is_suspect = is_suspect
        self._waiting: deque[_Waiter] = deque()
        self._suspects: deque[_Waiter] = deque()
        self._kept: Lane | None = None  # for suspects

    @property
    def num_in_flight(self) -> int:
        return sum(lane.num_in_flight for lane in self.lanes)

    def add(self, lane: Lane) -> None:
        """Prompts may be sent there from now on."""
        self.lanes.append(lane)
        self.wake()

    def remove(self, lane: Lane) -> None:
        """No more prompts are sent there."""
        self.lanes.remove(lane)
        self.wake()

    def close(self) -> None:
        """Grant no more slots: everyone who waits, and everyone who asks, gets None."""
        self.is_closed = True
        for waiter in (*self._waiting, *self._suspects):
            if not waiter.granted.done():
                waiter.granted.set_result(None)
        self._waiting.clear()
        self._suspects.clear()

    async def take(self, ordinal: int, num_tokens: int) -> Slot | None:
        """Wait for a slot for the prompt of a row; None after `close`."""
        if self.is_closed:
            return None
        granted: asyncio.Future[Slot | None] = asyncio.get_running_loop().create_future()
        queue = self._suspects if self._is_suspect(ordinal) else self._waiting
        queue.append(_Waiter(ordinal=ordinal, num_tokens=num_tokens, granted=granted))
        self.wake()
        try:
            return await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                if (slot := granted.result()) is not None:
                    slot.release()  # granted at the moment of the cancellation
            else:
                granted.cancel()
                self.wake()
            raise

    def wake(self) -> None:
        """Grant what can be granted; to be called after any change of a lane."""
        while (waiter := _first(self._waiting)) is not None:
            # Asked now: it may have become a suspect while it waited.
            if self._is_suspect(waiter.ordinal):
                self._suspects.append(self._waiting.popleft())
                continue
            self._wake_suspect()
            lane = _least_loaded(lane for lane in self.lanes if lane is not self._kept)
            if lane is None:
                return
            self._grant(self._waiting.popleft(), lane, is_alone=False)
        self._wake_suspect()

    def _wake_suspect(self) -> None:
        """Keep a lane for the first suspect, and grant it when that lane is empty."""
        waiter = _first(self._suspects)
        kept = self._kept
        if kept is not None and kept in self.lanes and kept.is_taken_whole:
            return
        if waiter is None:
            self._kept = None
            return
        if kept not in self.lanes or not kept.health.limit:
            self._kept = min(
                (lane for lane in self.lanes if lane.health.limit),
                key=lambda lane: lane.num_tokens,
                default=None,
            )
        if self._kept is not None and not self._kept.num_in_flight:
            self._grant(self._suspects.popleft(), self._kept, is_alone=True)

    def _grant(self, waiter: _Waiter, lane: Lane, *, is_alone: bool) -> None:
        lane.num_in_flight += 1
        lane.num_tokens += waiter.num_tokens
        lane.is_taken_whole = is_alone
        slot = Slot(lane=lane, num_tokens=waiter.num_tokens, is_alone=is_alone, _wake=self.wake)
        waiter.granted.set_result(slot)


def _first(waiting: deque[_Waiter]) -> _Waiter | None:
    """The first that still waits."""
    while waiting and waiting[0].granted.done():
        waiting.popleft()
    return waiting[0] if waiting else None


def _least_loaded(lanes: Iterable[Lane]) -> Lane | None:
    """The lane with the fewest tokens in flight that has room."""
    free = (lane for lane in lanes if lane.has_room)
    return min(free, key=lambda lane: lane.num_tokens, default=None)

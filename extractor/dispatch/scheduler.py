"""Hands each prompt a slot of the least-loaded server, first come, first served.

The health of a server bounds the requests in its lane. A suspect (suspects.py) waits for an empty
lane and takes it whole.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from extractor.dispatch.health import Health


@dataclass(eq=False, kw_only=True)
class Lane:
    """The requests in flight with one server."""

    health: Health
    num_in_flight: int = 0
    num_tokens: int = 0  # of the prompts in flight
    is_taken_whole: bool = False  # by a suspect

    def has_room(self, *, is_alone: bool) -> bool:
        """Whether one more prompt may be sent now."""
        if is_alone:
            return self.health.limit > 0 and self.num_in_flight == 0
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
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.granted.done():
                waiter.granted.set_result(None)

    async def take(self, ordinal: int, num_tokens: int) -> Slot | None:
        """Wait for a slot for the prompt of a row; None after `close`."""
        if self.is_closed:
            return None
        granted: asyncio.Future[Slot | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiter(ordinal=ordinal, num_tokens=num_tokens, granted=granted))
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
        while self._waiting:
            waiter = self._waiting[0]
            if not waiter.granted.done():
                # Asked now: it may have become a suspect while it waited.
                is_alone = self._is_suspect(waiter.ordinal)
                lane = self._least_loaded(is_alone=is_alone)
                if lane is None:
                    return
                lane.num_in_flight += 1
                lane.num_tokens += waiter.num_tokens
                lane.is_taken_whole = is_alone
                waiter.granted.set_result(
                    Slot(
                        lane=lane,
                        num_tokens=waiter.num_tokens,
                        is_alone=is_alone,
                        _wake=self.wake,
                    )
                )
            self._waiting.popleft()

    def _least_loaded(self, *, is_alone: bool) -> Lane | None:
        """The lane with the fewest tokens in flight that has room."""
        free = (lane for lane in self.lanes if lane.has_room(is_alone=is_alone))
        return min(free, key=lambda lane: lane.num_tokens, default=None)

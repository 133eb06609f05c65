"""Whose turn it is to send, and to which server: the one with the least to do that may take it.

Each server has a gate. What may be in flight behind it, its limiter and its breaker decide
(server_watch.py); here prompts wait for any gate (first come, first served), for the one whose
server may still be at work on them, or for a server of their own: a prompt that a dying server had
not answered is sent with nothing beside it, so that a second death leaves no doubt. One such prompt
at a time, in all servers together, so that it risks one server only.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(eq=False, kw_only=True)
class Gate:
    """One server's requests in flight, and how many there may be."""

    limit: int  # requests
    is_open: bool = True  # prompts may be sent at all
    num_in_flight: int = 0
    num_tokens: int = 0  # of the prompts in flight
    is_kept: bool = False  # for a prompt that must be alone

    @property
    def is_free(self) -> bool:
        """Whether it takes one more prompt now."""
        return self.is_open and not self.is_kept and self.num_in_flight < self.limit


def least_busy(gates: Sequence[Gate]) -> Gate | None:
    """The gate with the fewest tokens in flight of those that take one more prompt now.

    >>> one, other = Gate(limit=2, num_tokens=900), Gate(limit=2, num_tokens=30)
    >>> least_busy([one, other]) is other
    True
    >>> other.num_in_flight = 2
    >>> least_busy([one, other]) is one
    True
    >>> one.is_open = False
    >>> least_busy([one, other])
    """
    return min(
        (gate for gate in gates if gate.is_free), key=lambda gate: gate.num_tokens, default=None
    )


@dataclass(eq=False, kw_only=True)
class Turn:
    """The right to send one prompt to one server, until it is released."""

    gate: Gate
    num_tokens: int
    is_alone: bool
    _turns: Turns
    _is_over: bool = False

    def release(self) -> None:
        """The server has answered, or never will. Again: nothing."""
        if not self._is_over:
            self._is_over = True
            self._turns._release(self)


@dataclass(eq=False, kw_only=True)
class _Waiter:
    num_tokens: int
    only: Gate | None
    is_alone: bool
    granted: asyncio.Future[Turn | None]


class Turns:
    """Hands out turns at several gates."""

    def __init__(self) -> None:
        self.gates: list[Gate] = []
        self._waiting: deque[_Waiter] = deque()
        self._pinned: dict[Gate, deque[_Waiter]] = {}
        self._lonely: deque[_Waiter] = deque()
        self._kept: Gate | None = None  # the gate of the prompt that must be alone
        self.is_closed = False  # nobody gets a turn any more

    def add(self, gate: Gate) -> None:
        """A server that prompts may go to from now on."""
        self.gates.append(gate)
        self._pinned[gate] = deque()
        self.wake()

    def remove(self, gate: Gate) -> None:
        """No prompt goes there any more; who waited for this one alone is sent away (None)."""
        self.gates.remove(gate)
        if self._kept is gate:
            self._kept = None
        lonely = [waiter for waiter in self._lonely if waiter.only is gate]
        for waiter in (*self._pinned.pop(gate), *lonely):
            if not waiter.granted.done():
                waiter.granted.set_result(None)
        self.wake()

    def close(self) -> None:
        """Grant nothing any more; who waits is sent away (None), and so is whoever asks."""
        self.is_closed = True
        for waiter in (*self._waiting, *self._lonely, *itertools.chain(*self._pinned.values())):
            if not waiter.granted.done():
                waiter.granted.set_result(None)

    async def take(
        self, num_tokens: int, *, only: Gate | None = None, is_alone: bool = False
    ) -> Turn | None:
        """Wait for a turn: at the gate `only`, or at any; `is_alone`: with nothing else in flight.

        None where the gate `only` is, or goes, away, and after `close`.
        """
        if self.is_closed or (only is not None and only not in self.gates):
            return None
        waiter = _Waiter(
            num_tokens=num_tokens,
            only=only,
            is_alone=is_alone,
            granted=asyncio.get_running_loop().create_future(),
        )
        if is_alone:
            self._lonely.append(waiter)
        elif only is not None:
            self._pinned[only].append(waiter)
        else:
            self._waiting.append(waiter)
        self.wake()
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.done() and not waiter.granted.cancelled():
                if (turn := waiter.granted.result()) is not None:
                    turn.release()  # granted in the moment we were cancelled
            else:
                waiter.granted.cancel()
                self.wake()
            raise

    def wake(self) -> None:
        """Grant what can be granted; to be called after any change of a gate."""
        self._grant_lonely()
        for gate, queue in self._pinned.items():
            while gate.is_free and _head(queue) is not None:
                self._grant(queue, gate)
        while _head(self._waiting) is not None:
            free = least_busy(self.gates)
            if free is None:
                return
            self._grant(self._waiting, free)

    def _grant_lonely(self) -> None:
        head = _head(self._lonely)
        kept = self._kept
        if kept is not None and kept.is_kept and kept.num_in_flight:
            return  # it is being emptied, or its prompt is on its way
        if kept is not None and (head is None or not kept.is_open or head.only not in (None, kept)):
            kept.is_kept = False
            self._kept = kept = None
        if head is None:
            return
        if kept is None:
            candidates = [gate for gate in self.gates if gate.is_open]
            if head.only is not None:
                candidates = [gate for gate in candidates if gate is head.only]
            kept = min(candidates, key=lambda gate: gate.num_tokens, default=None)
            if kept is None:
                return
            kept.is_kept = True
            self._kept = kept
        if not kept.num_in_flight:
            self._grant(self._lonely, kept)

    def _grant(self, queue: deque[_Waiter], gate: Gate) -> None:
        waiter = queue.popleft()
        gate.num_in_flight += 1
        gate.num_tokens += waiter.num_tokens
        turn = Turn(gate=gate, num_tokens=waiter.num_tokens, is_alone=waiter.is_alone, _turns=self)
        waiter.granted.set_result(turn)

    def _release(self, turn: Turn) -> None:
        turn.gate.num_in_flight -= 1
        turn.gate.num_tokens -= turn.num_tokens
        if turn.is_alone:
            turn.gate.is_kept = False
            if self._kept is turn.gate:
                self._kept = None
        self.wake()


def _head(queue: deque[_Waiter]) -> _Waiter | None:
    """The first that still waits."""
    while queue and queue[0].granted.done():
        queue.popleft()
    return queue[0] if queue else None

"""How many prompts are under way at a time: bounded by number, and small ones by bytes besides.

A prompt's task outlives its request by the copy to the shard: twice as many prompts as requests
keep the servers busy meanwhile. Small samples are made durable in groups of hundreds; those of a
group may be on their way beside the others: they take little memory, and would else wait for each
other.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

#: Of dumps of prompts that take no place by number.
LIGHT_BYTES = 16 << 20
#: The least that such a prompt counts for: 256 of them at most.
LEAST_LIGHT_BYTES = 64 << 10


def num_places(room: int) -> int:
    """Prompts of any size that are under way at a time, where the servers take `room` requests."""
    return 2 * max(1, room)


@dataclass(frozen=True, slots=True)
class Place:
    """One prompt's; to be given back."""

    light_bytes: int  # 0: one of those for prompts of any size


class Places:
    """Not fair: for one task that takes."""

    def __init__(self) -> None:
        self._most = num_places(0)
        self._num_taken = 0  # of those for any size
        self._light_taken = 0  # bytes
        self._freed = asyncio.Event()

    def resize(self, room: int) -> None:
        """The servers take `room` requests from now on."""
        self._most = num_places(room)
        self._freed.set()

    async def take(self, dump_bytes: int) -> Place:
        """Wait for a place for a prompt whose dumps may take so many bytes."""
        light_bytes = max(LEAST_LIGHT_BYTES, dump_bytes)
        while True:
            if self._light_taken + light_bytes <= LIGHT_BYTES:
                self._light_taken += light_bytes
                return Place(light_bytes)
            if self._num_taken < self._most:
                self._num_taken += 1
                return Place(0)
            self._freed.clear()
            await self._freed.wait()

    def give_back(self, place: Place) -> None:
        """What `take` gave."""
        if place.light_bytes:
            self._light_taken -= place.light_bytes
        else:
            self._num_taken -= 1
        self._freed.set()

"""Spreads samples over several movers, each with a shard of its own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from extractor.core.counters import Counters
from extractor.core.failure import Failure
from extractor.core.timings import StoreTimings
from extractor.dumps.dump_reader import DumpPiece
from extractor.shards.format import sample_bytes
from extractor.shards.mover import Mover, SampleRecorder
from extractor.shards.recovery import OpenShard
from extractor.shards.sequence import ShardSequence, seal_left_open
from extractor.shards.writer import ShardSettings
from manifest.writer_thread import StoreOwner
from prompts.types import Prompt


class MoverPool:
    """Several movers; each is run in a task by the owner of the pool."""

    def __init__(
        self,
        settings: ShardSettings,
        owner: StoreOwner,
        recorder: SampleRecorder,
        counters: Counters,
        *,
        count: int,
        next_number: int,
        budget_bytes: int,
        timings: StoreTimings,
    ) -> None:
        """`budget_bytes`: the maximum under the dump root. Groups take up to half of it, so that
        the server can fill the other half meanwhile: the room of a group is freed all at once, and
        neither side is to wait for the other in turn."""
        self._settings = settings
        self._owner = owner
        self._undivided_bytes = timings.undivided_bytes
        numbers = itertools.count(next_number)
        self._sequences = [
            ShardSequence(settings, owner, numbers=numbers, rows=counters.rows)
            for _ in range(count)
        ]
        group_bytes = min(timings.group_bytes, budget_bytes // (2 * count))
        timings = replace(timings, group_bytes=group_bytes)
        self.all = tuple(
            Mover(shards, recorder, counters.stages, timings) for shards in self._sequences
        )

    async def open(self, left: Sequence[OpenShard]) -> None:
        """Continue the shards that earlier sessions left open."""
        for shards, found in zip(self._sequences, left, strict=False):
            await shards.resume(found)
        for found in left[len(self._sequences) :]:  # this session has fewer movers
            await seal_left_open(self._settings, self._owner, found)

    async def store(
        self, prompt: Prompt, pieces: Sequence[DumpPiece], *, attempts: int
    ) -> Failure | None:
        """`Mover.store` of the first mover with a small backlog, or of that with the smallest."""
        size = sample_bytes(prompt.num_tokens, self._settings.identity.layout)
        light = (mover for mover in self.all if mover.backlog_bytes + size <= self._undivided_bytes)
        mover = next(light, None) or min(self.all, key=lambda mover: mover.backlog_bytes)
        return await mover.store(prompt, pieces, attempts=attempts)

    @property
    def backlog(self) -> int:
        """Samples that wait for a mover."""
        return sum(mover.backlog for mover in self.all)

    async def close(self, *, seal: bool) -> None:
        """Stop the movers. `seal`: no more samples will come, so finish their shards."""
        async with AsyncExitStack() as stack:  # all of them, whatever one raises
            for shards in reversed(self._sequences):
                stack.push_async_callback(shards.close, seal=seal)

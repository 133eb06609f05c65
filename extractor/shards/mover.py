"""Copies samples from their dumps into shards, many per fsync.

copy -> fdatasync -> manifest commit -> unlink the dumps. Samples that arrive while a group is
copied form the next, which is copied while the first is committed and its dumps are removed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from extractor.core.counters import Stage, Stages
from extractor.core.failure import Failure
from extractor.core.timings import StoreTimings
from extractor.dumps.dump_piece import SampleFault
from extractor.dumps.dump_reader import DumpPiece
from extractor.shards.format import sample_bytes
from extractor.shards.sequence import ShardSequence
from extractor.shards.writer import ShardWriter
from manifest.records import Stored
from prompts.types import Prompt

logger = logging.getLogger(__name__)


class SampleRecorder(Protocol):
    """Records durable samples."""

    def server_of(self, boot_id: str) -> int | None:
        """Number of the recorded server start. Called from the mover's thread."""

    async def store(self, samples: Sequence[tuple[Prompt, Stored]]) -> None:
        """Return when the manifest durably has the samples, whose bytes are durable."""


@dataclass(frozen=True, kw_only=True)
class _Job:
    prompt: Prompt
    pieces: Sequence[DumpPiece]
    attempts: int
    size_bytes: int  # of the sample
    done: asyncio.Future[Failure | None]
    queued_at: float = field(default_factory=time.monotonic)

    def log(
        self, stage: str, details: str = "", *values: object, level: int = logging.DEBUG
    ) -> None:
        """Log that the sample passed `stage`."""
        if logger.isEnabledFor(level):
            rid = self.pieces[0].handle.dump.header.rid
            logger.log(level, f"{stage} rid=%s row=%d{details}", rid, self.prompt.ordinal, *values)


class Mover:
    """Fills one sequence of shards."""

    def __init__(
        self, shards: ShardSequence, recorder: SampleRecorder, stages: Stages, timings: StoreTimings
    ) -> None:
        self._shards = shards
        self._recorder = recorder
        self._stages = stages
        self._timings = timings
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue()
        self._settling: asyncio.Task[None] | None = None  # of the last group copied
        #: Bytes of the samples that wait or are being moved.
        self.backlog_bytes = 0

    @property
    def backlog(self) -> int:
        """Samples that wait."""
        return self._jobs.qsize()

    async def store(
        self, prompt: Prompt, pieces: Sequence[DumpPiece], *, attempts: int
    ) -> Failure | None:
        """Return once the sample is durable, in the manifest, and its dumps are removed; or the
        reason why the dumps give no sample (they are removed, too)."""
        done: asyncio.Future[Failure | None] = asyncio.get_running_loop().create_future()
        size = sample_bytes(prompt.num_tokens, self._shards.layout)
        self.backlog_bytes += size
        try:
            job = _Job(prompt=prompt, pieces=pieces, attempts=attempts, size_bytes=size, done=done)
            job.log("queued", " bytes=%d", size)
            self._jobs.put_nowait(job)
            return await done
        finally:
            self.backlog_bytes -= size

    async def run(self) -> None:
        """Move samples until cancelled. Raises SpaceError, UsageError, ManifestError, by
        themselves or in an ExceptionGroup."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                group = await self._next_group()
                while group:
                    group = group[await self._move(group, tasks) :]

    async def _next_group(self) -> list[_Job]:
        timings = self._timings
        group = [await self._jobs.get()]
        size = group[0].size_bytes
        if size < timings.small_bytes:
            await asyncio.sleep(timings.gather_s)
        while (
            not self._jobs.empty()
            and len(group) < timings.group_samples
            and size < timings.group_bytes
        ):
            group.append(self._jobs.get_nowait())
            size += group[-1].size_bytes
        return group

    async def _move(self, group: Sequence[_Job], tasks: asyncio.TaskGroup) -> int:
        """Copy as many of `group`, from its start, as one shard takes; return their number."""
        writer = await self._writer_for(group)
        outcomes = await self._shards.in_thread(lambda: self._append(writer, group))
        await self._settled()
        self._settling = tasks.create_task(
            self._settle(group[: len(outcomes)], outcomes), name="mover-settle"
        )
        return len(outcomes)

    async def _writer_for(self, group: Sequence[_Job]) -> ShardWriter:
        if not self._shards.has_room(group[0].prompt.num_tokens):
            await self._settled()
            await self._shards.finish()
        return await self._shards.writer(
            mean_sample_bytes=sum(job.size_bytes for job in group) / len(group)
        )

    def _append(self, writer: ShardWriter, group: Sequence[_Job]) -> list[Stored | Failure]:
        outcomes: list[Stored | Failure] = []
        for job in group:
            if not writer.has_room(job.prompt.num_tokens):
                break
            began = time.monotonic()
            self._stages[Stage.MOVER_WAIT].add(began - job.queued_at)
            try:
                sample = writer.append(job.prompt, job.pieces)
                server = self._recorder.server_of(job.pieces[0].handle.dump.header.boot_id)
                outcomes.append(
                    Stored(
                        ordinal=job.prompt.ordinal,
                        sample=replace(sample, server=server),
                        attempts=job.attempts,
                    )
                )
                job.log("copied", " shard=%d offset=%d", sample.shard, sample.offset)
            except SampleFault as fault:
                failure = fault.failure
                job.log(
                    "not stored", " reason=%s: %s", failure.reason, failure.detail,
                    level=logging.INFO,
                )  # fmt: skip
                outcomes.append(failure)
            self._stages[Stage.COPY].add(time.monotonic() - began)
        began = time.monotonic()
        writer.sync()
        self._stages[Stage.SYNC].add(time.monotonic() - began)
        return outcomes

    async def _settle(self, group: Sequence[_Job], outcomes: Sequence[Stored | Failure]) -> None:
        """Record the samples of a copied group, whose bytes are durable, and free their dumps."""
        began = time.monotonic()
        stored = [
            (job, outcome)
            for job, outcome in zip(group, outcomes, strict=True)
            if isinstance(outcome, Stored)
        ]
        await self._recorder.store([(job.prompt, outcome) for job, outcome in stored])
        for job, _ in stored:
            job.log("committed")
        self._stages[Stage.COMMIT].add(time.monotonic() - began)
        # Only now: until the commit, the dump is the only copy that is sure to survive a crash.
        await self._shards.in_thread(lambda: self._remove_dumps(group))
        for job, outcome in zip(group, outcomes, strict=True):
            if not job.done.done():
                job.done.set_result(None if isinstance(outcome, Stored) else outcome)

    async def _settled(self) -> None:
        """Return once the manifest knows every sample copied so far."""
        if self._settling is not None:
            await self._settling
            self._settling = None

    def _remove_dumps(self, jobs: Sequence[_Job]) -> None:
        for job in jobs:
            for piece in job.pieces:
                file = piece.handle
                if (seconds := file.age_s()) is not None:
                    self._stages[Stage.RESIDENCY].add(seconds)
                file.unlink()
            job.log("dumps removed", " pieces=%d", len(job.pieces))

"""Moves samples from their dumps into shards, in durable order, many per fsync.

copy -> fdatasync -> manifest commit -> unlink the dumps. What arrives while one group is copied
forms the next, so the group size adapts to what the disk costs; while one group is committed and
its dumps are removed, the next is copied.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

from extractor.collect import DumpPiece
from extractor.copying import SampleFault
from extractor.errors import storage_error
from extractor.files import age_s
from extractor.measurements import Stage, Stages, new_stages
from extractor.reconcile import OpenShard
from extractor.retry import Failure
from extractor.shard_format import sample_bytes, samples_expected
from extractor.shards import ShardSettings, ShardWriter
from extractor.signals import to_its_end
from manifest.records import Shard, Stored, StoredRow
from manifest.writer_thread import StoreOwner
from prompts.types import Prompt

Result = TypeVar("Result")

#: A group that begins with so small a sample waits so long for more: its sync, its commit and the
#: turns of threads cost more than its bytes.
SMALL_BYTES = 1 << 20
GATHER_S = 0.02
#: Most samples and bytes in one group: bounds how long a dump waits for its fsync.
GROUP_SAMPLES = 256
GROUP_BYTES = 128 << 20
#: Up to so many bytes go to one mover though others have nothing to do: split up, they would cost
#: each of them a sync, a commit and the turns of its threads, and gain nothing.
UNDIVIDED_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class _Job:
    prompt: Prompt
    pieces: Sequence[DumpPiece]
    attempts: int
    size_bytes: int  # of the sample
    done: asyncio.Future[Failure | None]
    queued_at: float = field(default_factory=time.monotonic)


class Mover:
    """The open shard that it fills, and a thread that does so."""

    def __init__(
        self,
        settings: ShardSettings,
        owner: StoreOwner,
        *,
        next_number: Callable[[], int],
        rows_left: Callable[[], int],
        count_stored: Callable[[Prompt], None] = lambda prompt: None,
        server_of: Callable[[str], int | None] = lambda boot_id: None,
        stages: Stages | None = None,
        group_bytes: int = GROUP_BYTES,
    ) -> None:
        """`count_stored`: called once for each sample that the manifest has as stored. `server_of`:
        boot id -> number of the recorded server start. `stages`: counts the duration of each stage.
        `group_bytes`: the sample that reaches this size ends its group."""
        self._group_bytes = group_bytes
        self._stages = new_stages() if stages is None else stages
        self._settings = settings
        self._layout = settings.identity.layout
        self._owner = owner
        self._next_number = next_number
        self._rows_left = rows_left
        self._count_stored = count_stored
        self._server_of = server_of
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue()
        # One copies, and is the only one to touch the writer; one removes dumps meanwhile.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="mover")
        self._writer: ShardWriter | None = None
        self._settling: asyncio.Task[None] | None = None  # of the last group copied
        #: Bytes of the samples that wait or are on their way.
        self.backlog_bytes = 0

    @property
    def backlog(self) -> int:
        """Samples that wait."""
        return self._jobs.qsize()

    async def resume(self, shard: Shard, rows: Sequence[StoredRow]) -> None:
        """Go on filling a shard that an earlier session left open."""
        self._writer = await self._in_thread(
            lambda: ShardWriter.resume(self._settings, shard, rows)
        )

    async def store(
        self, prompt: Prompt, pieces: Sequence[DumpPiece], *, attempts: int
    ) -> Failure | None:
        """Return once the sample is durable, in the manifest, and its dumps are removed; or why
        the dumps are no good (they are removed too)."""
        done: asyncio.Future[Failure | None] = asyncio.get_running_loop().create_future()
        size = sample_bytes(prompt.num_tokens, self._layout)
        self.backlog_bytes += size
        try:
            self._jobs.put_nowait(
                _Job(prompt=prompt, pieces=pieces, attempts=attempts, size_bytes=size, done=done)
            )
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
        group = [await self._jobs.get()]
        size = group[0].size_bytes
        if size < SMALL_BYTES:
            await asyncio.sleep(GATHER_S)
        while not self._jobs.empty() and len(group) < GROUP_SAMPLES and size < self._group_bytes:
            group.append(self._jobs.get_nowait())
            size += group[-1].size_bytes
        return group

    async def close(self, *, seal: bool) -> None:
        """Stop the thread. `seal`: no more samples will come, so finish the shard."""
        try:
            if seal and self._writer is not None:
                await self._finish(self._writer)
        finally:
            # Before the file is closed: after a cancellation the thread may still write to it, and
            # the directory must stay locked until it is done. If the disk never answers, the
            # signal handler's timer ends the process.
            await to_its_end(asyncio.to_thread(self._threads.shutdown))
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    async def _move(self, group: Sequence[_Job], tasks: asyncio.TaskGroup) -> int:
        """Copy as many of `group`, from its start, as one shard takes; how many those were."""
        writer = await self._writer_for(group)
        outcomes = await self._in_thread(lambda: self._append(writer, group))
        await self._settled()
        self._settling = tasks.create_task(
            self._settle(group[: len(outcomes)], outcomes), name="mover-settle"
        )
        return len(outcomes)

    async def _settle(self, group: Sequence[_Job], outcomes: Sequence[Stored | Failure]) -> None:
        """Tell the manifest what became of samples whose copies are durable; free their dumps."""
        began = time.monotonic()
        stored = [
            (job, outcome)
            for job, outcome in zip(group, outcomes, strict=True)
            if isinstance(outcome, Stored)
        ]
        try:
            await self._owner.commit(*(outcome for _, outcome in stored))
        except asyncio.CancelledError:
            # The commit goes on, and the session may, when a server returns.
            self._count(stored)
            raise
        self._count(stored)
        self._stages[Stage.COMMIT].add(time.monotonic() - began)
        # Only now: until the commit, the dump is the only copy that is sure to survive a crash.
        await self._in_thread(lambda: self._remove_dumps(group))
        for job, outcome in zip(group, outcomes, strict=True):
            if not job.done.done():
                job.done.set_result(None if isinstance(outcome, Stored) else outcome)

    def _count(self, stored: Sequence[tuple[_Job, Stored]]) -> None:
        for job, _ in stored:
            self._count_stored(job.prompt)

    async def _settled(self) -> None:
        """Return once the manifest knows every sample copied so far."""
        if self._settling is not None:
            await self._settling
            self._settling = None

    def _append(self, writer: ShardWriter, group: Sequence[_Job]) -> list[Stored | Failure]:
        outcomes: list[Stored | Failure] = []
        for job in group:
            if not writer.has_room(job.prompt.num_tokens):
                break
            began = time.monotonic()
            self._stages[Stage.MOVER_WAIT].add(began - job.queued_at)
            try:
                sample = writer.append(job.prompt, job.pieces)
                boot_id = job.pieces[0].handle.dump.header.boot_id
                outcomes.append(
                    Stored(
                        ordinal=job.prompt.ordinal,
                        sample=replace(sample, server=self._server_of(boot_id)),
                        attempts=job.attempts,
                    )
                )
            except SampleFault as fault:
                outcomes.append(fault.failure)
            self._stages[Stage.COPY].add(time.monotonic() - began)
        began = time.monotonic()
        writer.sync()
        self._stages[Stage.SYNC].add(time.monotonic() - began)
        return outcomes

    def _remove_dumps(self, jobs: Sequence[_Job]) -> None:
        for job in jobs:
            for piece in job.pieces:
                path = piece.handle.path
                if (seconds := age_s(path)) is not None:
                    self._stages[Stage.RESIDENCY].add(seconds)
                path.unlink(missing_ok=True)

    async def _writer_for(self, group: Sequence[_Job]) -> ShardWriter:
        num_tokens = group[0].prompt.num_tokens
        if self._writer is not None and not self._writer.has_room(num_tokens):
            await self._settled()
            await self._finish(self._writer)
        if self._writer is None:
            expected = samples_expected(
                shard_bytes=self._settings.shard_bytes,
                mean_sample_bytes=sum(job.size_bytes for job in group) / len(group),
                rows_left=self._rows_left(),
            )
            number = self._next_number()
            writer = await self._in_thread(
                lambda: ShardWriter.create(self._settings, number=number, expected_samples=expected)
            )
            await self._owner.call(lambda store: store.add_shard(writer.shard))
            self._writer = writer
        return self._writer

    async def _finish(self, writer: ShardWriter) -> None:
        """Seal the open shard, or drop it where it holds nothing. When that is broken off, `close`
        closes the file: the thread may still be at work on it."""
        number = writer.shard.number
        if writer.num_samples:
            digest = await self._in_thread(writer.seal)
            await self._owner.call(lambda store: store.seal_shard(number, digest))
        else:
            await self._owner.call(lambda store: store.drop_shard(number))
            await self._in_thread(writer.discard)
        self._writer = None
        writer.close()

    async def _in_thread(self, function: Callable[[], Result]) -> Result:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function)
        except OSError as error:
            raise storage_error(error, where=self._settings.directory) from error


class Movers:
    """Several movers, each with a shard of its own."""

    def __init__(
        self,
        settings: ShardSettings,
        owner: StoreOwner,
        *,
        count: int,
        next_number: int,
        rows_left: Callable[[], int],
        count_stored: Callable[[Prompt], None],
        server_of: Callable[[str], int | None] = lambda boot_id: None,
        stages: Stages | None = None,
        budget_bytes: int | None = None,
    ) -> None:
        """`budget_bytes`: what may lie under the dump root. No more than half of it is in groups,
        so that the server can fill the other half meanwhile: the room of a group is given back
        all at once, and neither is to wait for the other in turn."""
        self._settings = settings
        self._owner = owner
        numbers = itertools.count(next_number)
        group_bytes = GROUP_BYTES
        if budget_bytes is not None:
            group_bytes = min(GROUP_BYTES, budget_bytes // (2 * count))
        self.all = tuple(
            Mover(
                settings,
                owner,
                next_number=lambda: next(numbers),
                rows_left=rows_left,
                count_stored=count_stored,
                server_of=server_of,
                stages=stages,
                group_bytes=group_bytes,
            )
            for _ in range(count)
        )

    async def open(self, left: Sequence[OpenShard]) -> None:
        """Go on with the shards that earlier sessions left open."""
        for mover, found in zip(self.all, left, strict=False):
            await mover.resume(found.shard, found.rows)
        for found in left[len(self.all) :]:  # this session has fewer movers
            await seal_left_open(self._settings, self._owner, found.shard, found.rows)

    async def store(
        self, prompt: Prompt, pieces: Sequence[DumpPiece], *, attempts: int
    ) -> Failure | None:
        """`Mover.store` of the one that has least to do, or of the first that has little."""
        size = sample_bytes(prompt.num_tokens, self._settings.identity.layout)
        light = (mover for mover in self.all if mover.backlog_bytes + size <= UNDIVIDED_BYTES)
        mover = next(light, None) or min(self.all, key=lambda mover: mover.backlog_bytes)
        return await mover.store(prompt, pieces, attempts=attempts)

    @property
    def backlog(self) -> int:
        """Samples that wait for a mover."""
        return sum(mover.backlog for mover in self.all)

    async def close(self, *, seal: bool) -> None:
        """`Mover.close` of each."""
        for mover in self.all:
            await mover.close(seal=seal)


async def seal_left_open(
    settings: ShardSettings, owner: StoreOwner, shard: Shard, rows: Sequence[StoredRow]
) -> None:
    """Seal a shard that an earlier session left open and that gets no more samples."""
    mover = Mover(settings, owner, next_number=lambda: shard.number, rows_left=lambda: 0)
    await mover.resume(shard, rows)
    await mover.close(seal=True)

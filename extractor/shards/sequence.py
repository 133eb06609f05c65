"""Opens, registers and seals shards, one after another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from extractor.core.counters import InputRows
from extractor.core.errors import storage_error
from extractor.shards.format import samples_expected
from extractor.shards.recovery import OpenShard
from extractor.shards.writer import ShardSettings, ShardWriter
from extractor.system.signals import to_its_end
from manifest.writer_thread import StoreOwner
from server_patch.dump_format import StateLayout

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class ShardSequence:
    """The shards that one mover fills, of which at most one is open, and its threads."""

    def __init__(
        self, settings: ShardSettings, owner: StoreOwner, *, numbers: Iterator[int], rows: InputRows
    ) -> None:
        """`numbers`: of new shards. `rows`: bound the samples that a new shard expects."""
        self.layout: StateLayout = settings.identity.layout
        self._settings = settings
        self._owner = owner
        self._numbers = numbers
        self._rows = rows
        # One copies, and is the only one to touch the writer; one removes dumps meanwhile.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="mover")
        self._writer: ShardWriter | None = None

    async def resume(self, found: OpenShard) -> None:
        """Continue a shard that an earlier session left open."""
        self._writer = await self.in_thread(
            lambda: ShardWriter.resume(self._settings, found.shard, found.rows)
        )

    def has_room(self, num_tokens: int) -> bool:
        """Whether a sample of that length may go to the open shard, or none is open."""
        return self._writer is None or self._writer.has_room(num_tokens)

    async def writer(self, *, mean_sample_bytes: float) -> ShardWriter:
        """The open shard, or a new one that the manifest knows."""
        if self._writer is None:
            expected = samples_expected(
                shard_bytes=self._settings.shard_bytes,
                mean_sample_bytes=mean_sample_bytes,
                rows_left=max(1, self._rows.left),
            )
            number = next(self._numbers)
            writer = await self.in_thread(
                lambda: ShardWriter.create(self._settings, number=number, expected_samples=expected)
            )
            await self._owner.call(lambda store: store.add_shard(writer.shard))
            logger.info("shard opened shard=%d name=%s", number, writer.shard.name)
            self._writer = writer
        return self._writer

    async def finish(self) -> None:
        """Seal the open shard, or remove it if it is empty; the manifest must know its samples."""
        writer = self._writer
        if writer is None:
            return
        number = writer.shard.number
        if writer.num_samples:
            digest = await self.in_thread(writer.seal)
            await self._owner.call(lambda store: store.seal_shard(number, digest))
            logger.info("shard sealed shard=%d samples=%d", number, writer.num_samples)
        else:
            await self._owner.call(lambda store: store.drop_shard(number))
            await self.in_thread(writer.discard)
        self._writer = None
        writer.close()

    async def close(self, *, seal: bool) -> None:
        """Stop the threads and close the open shard. `seal`: no more samples will come."""
        try:
            if seal:
                await self.finish()
        finally:
            # Before the file is closed: after a cancellation the thread may still write to it, and
            # the directory must stay locked until it is done. If the disk never answers, the
            # signal handler's timer ends the process.
            await to_its_end(asyncio.to_thread(self._threads.shutdown))
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    async def in_thread(self, function: Callable[[], Result]) -> Result:
        """The function's result. Raises SpaceError or UsageError for an OSError."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function)
        except OSError as error:
            raise storage_error(error, where=self._settings.directory.path) from error


async def seal_left_open(settings: ShardSettings, owner: StoreOwner, found: OpenShard) -> None:
    """Seal a shard that an earlier session left open and that gets no more samples."""
    shards = ShardSequence(settings, owner, numbers=iter(()), rows=InputRows())
    await shards.resume(found)
    await shards.close(seal=True)

"""Edge: brings the shards on disk and the manifest in line after a session that was cut off."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from extractor.core.events import Report
from extractor.core.humanize import counted
from extractor.shards.strays import require_free_numbers
from extractor.shards.writer import (
    is_whole_on_disk,
    lost_rows,
    remove_emptied,
    remove_unknown,
    reopen_on_disk,
    sealed_on_disk,
)
from manifest.records import Shard, StoredRow
from manifest.store import Store
from manifest.writer_thread import StoreOwner


@dataclass(frozen=True, kw_only=True)
class OpenShard:
    """A shard that takes more samples, and those it has, in file order."""

    shard: Shard
    rows: tuple[StoredRow, ...]


@dataclass(frozen=True, kw_only=True)
class Reconciled:
    """What earlier sessions left."""

    open_shards: tuple[OpenShard, ...]
    lost: tuple[int, ...]  # ordinals of stored samples whose bytes are gone; PLANNED again
    next_number: int  # of a new shard


async def reconcile(owner: StoreOwner, directory: Path, *, report: Report) -> Reconciled:
    """Reopen shards whose end is gone, note those that were sealed, and tell which are open.

    Raises UsageError for shards that the manifest should know of and does not, OSError.
    """
    shards = await owner.call(lambda store: store.shards())
    require_free_numbers(directory, shards)
    remove_unknown(directory, shards)
    open_shards: list[OpenShard] = []
    lost_ordinals: list[int] = []
    for shard in shards:
        if shard.is_sealed and not shard.num_samples:
            # A repair moved all of them and was cut off before it came to this.
            remove_emptied(directory, shard)
            await owner.call(partial(Store.drop_shard, number=shard.number))
            continue
        if shard.is_sealed and is_whole_on_disk(directory, shard):
            continue  # without asking for its rows, of which a large data set has millions
        rows = await owner.call(partial(Store.shard_rows, number=shard.number))
        lost = lost_rows(directory, shard, rows)
        if lost:
            report(
                f"{directory / shard.name}: the bytes of {counted(len(lost), 'stored sample')} "
                "are gone; they are extracted again",
                level="warning",
            )
            # The name first: until the manifest knows, the same samples are found lost again.
            reopen_on_disk(directory, shard)
            ordinals = [row.ordinal for row in lost]
            await owner.call(partial(Store.forget_stored, ordinals=ordinals))
            lost_ordinals += ordinals
            rows = rows[: len(rows) - len(lost)]
        elif (digest := sealed_on_disk(directory, shard, rows)) is not None:
            await owner.call(partial(Store.seal_shard, number=shard.number, digest=digest))
            continue
        open_shards.append(OpenShard(shard=replace(shard, is_sealed=False), rows=tuple(rows)))
    return Reconciled(
        open_shards=tuple(open_shards),
        lost=tuple(lost_ordinals),
        next_number=max((shard.number + 1 for shard in shards), default=0),
    )

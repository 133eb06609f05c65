"""Brings the shards on disk and the manifest in line after a session that was cut off.

Shards that the manifest does not know are never overwritten.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from extractor.core.errors import UsageError
from extractor.core.events import ReportLine
from extractor.core.humanize import counted
from extractor.core.locations import MANIFEST_NAME, SHARDS_DIRECTORY
from extractor.shards.writer import (
    is_whole_on_disk,
    lost_rows,
    open_names,
    remove_unknown,
    reopen_on_disk,
    sealed_names,
    sealed_on_disk,
)
from manifest.records import Shard, StoredRow, shard_name
from manifest.store import Store
from manifest.writer_thread import StoreOwner
from server_patch.directory import Directory


@dataclass(frozen=True, kw_only=True)
class OpenShard:
    """A shard that takes more samples, and its samples, in file order."""

    shard: Shard
    rows: tuple[StoredRow, ...]


@dataclass(frozen=True, kw_only=True)
class Reconciled:
    """The shards that earlier sessions left."""

    open_shards: tuple[OpenShard, ...]
    lost: tuple[int, ...]  # ordinals of stored samples whose bytes are gone; PLANNED again
    next_number: int  # of a new shard


async def reconcile(owner: StoreOwner, directory: Directory, *, report: ReportLine) -> Reconciled:
    """Reopen shards whose end is gone, register those that were sealed, and list the open ones.

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
            directory.unlink(shard.name)
            directory.sync()
            await owner.call(partial(Store.drop_shard, number=shard.number))
            continue
        if shard.is_sealed and is_whole_on_disk(directory, shard):
            continue  # without asking for its rows, of which a large data set has millions
        rows = await owner.call(partial(Store.shard_rows, number=shard.number))
        lost = lost_rows(directory, shard, rows)
        if lost:
            path, samples = directory.path / shard.name, counted(len(lost), "stored sample")
            report(
                f"{path}: the bytes of {samples} are gone; they are extracted again",
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


class ManifestLost(UsageError):
    """Shards without a manifest that knows of them."""


def require_manifest(out: Path) -> None:
    """Raise UsageError where shards lie beside a manifest that is missing, empty, or none."""
    path = out / MANIFEST_NAME
    try:
        facts = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        _refuse_any(out, f"{path} is missing")
        return
    if not stat.S_ISREG(facts.st_mode):
        _refuse_any(out, f"{path} is a link, or not a file")
    elif not facts.st_size:
        _refuse_any(out, f"{path} is an empty file")


def require_begun(out: Path) -> None:
    """Raise UsageError where shards lie beside a manifest in which no data set was ever begun."""
    _refuse_any(out, f"{out / MANIFEST_NAME} knows of no data set")


def require_free_numbers(directory: Directory, shards: Sequence[Shard]) -> None:
    """Raise UsageError for a sealed file that the manifest does not know, under a name that a new
    shard would get: the manifest is older than the files. (An open one is from a crash.)"""
    next_name = shard_name(max((shard.number + 1 for shard in shards), default=0))
    if strays := [name for name in sealed_names(directory) if name >= next_name]:
        out = directory.path.parent
        _refuse(out, f"{out / MANIFEST_NAME} does not know of them", strays)


def _refuse_any(out: Path, what: str) -> None:
    try:
        with Directory.open(out) as directory, directory.subdirectory(SHARDS_DIRECTORY) as shards:
            names = open_names(shards) + sealed_names(shards)
    except (FileNotFoundError, NotADirectoryError):
        return
    if names:
        _refuse(out, what, names)


def _refuse(out: Path, what: str, names: Sequence[str]) -> None:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    raise ManifestLost(
        f"{out / SHARDS_DIRECTORY} holds {shown}, but {what}. A run would write over what is "
        f"there. Restore {MANIFEST_NAME} from a copy, or name another --out, or remove the shards."
    )

"""`extractor verify --repair`: keep what is proven; the next run extracts the rest again.

A shard with anything wrong in it is left for a new one that gets its sound samples, in the order in
which a run stores them: copy (and prove once more), fdatasync, one manifest commit, and only then
is the damaged file removed. A crash leaves nothing that the next run or repair does not settle.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from extractor.audit import Audit, FindingKind, Progress, audit, open_manifest
from extractor.config import MANIFEST_NAME, SHARDS_DIRECTORY, Identity, RunOptions
from extractor.errors import CorruptData, storage_error
from extractor.files import sync_directory
from extractor.lock import exclusive
from extractor.shards import ShardSettings, ShardWriter, sealed_shard_path
from extractor.tables import counted
from manifest.records import Forgotten, Relocated, Row, Shard
from manifest.store import Store

#: What is wrong with bytes; all else is settled by the next run, or by a person.
_DAMAGE = frozenset(
    {
        FindingKind.SHARD_MISSING,
        FindingKind.SHARD_HEADER,
        FindingKind.SHARD_SIZE,
        FindingKind.SHARD_DIGEST,
        FindingKind.SAMPLE_OVERLAP,
        FindingKind.SAMPLE_SIZE,
        FindingKind.SAMPLE_DIGEST,
        FindingKind.SAMPLE_TOKENS,
        FindingKind.SAMPLE_NONFINITE,
    }
)


@dataclass(frozen=True, kw_only=True)
class Repair:
    """What a repair did."""

    shards: int  # damaged ones, replaced or given up
    kept: int  # sound samples of these
    planned: int  # samples that the next run extracts again
    unknown: tuple[str, ...] = ()  # files among the shards that the manifest does not know: left

    def to_document(self) -> dict[str, Any]:
        """The part of the JSON of `extractor verify --repair`."""
        return asdict(self)

    def to_text(self) -> str:
        lines = ["nothing to repair"]
        if self.shards:
            lines = [
                f"repaired {counted(self.shards, 'shard')}: {counted(self.kept, 'sample')} kept, "
                f"{self.planned:,} to be extracted again by the same `extractor run`"
            ]
        if self.unknown:
            lines.append(
                f"left alone {counted(len(self.unknown), 'file')} that the manifest does not know; "
                "move away or remove by hand: " + ", ".join(self.unknown)
            )
        return "\n".join(lines)


def audit_and_repair(out: Path, *, progress: Progress = lambda _: None) -> tuple[Audit, Repair]:
    """Check a data set and replace its damaged shards.

    Raises OutputBusy while a run writes it, CorruptData for a manifest that is damaged itself,
    ManifestMissing where there is no data set, UsageError where nothing can be written, SpaceError,
    ManifestError.
    """
    # First, so that no lock is left in a directory that is no data set.
    open_manifest(out).close()
    try:
        return _audit_and_repair(out, progress)
    except OSError as error:
        raise storage_error(error, where=out) from error


def _audit_and_repair(out: Path, progress: Progress) -> tuple[Audit, Repair]:
    with exclusive(out):
        found = audit(out, progress=progress)
        if FindingKind.MANIFEST_DAMAGED in found.findings_by_kind():
            raise CorruptData(
                f"{out / MANIFEST_NAME} is damaged, and nothing else knows what it held. "
                "Restore it from a copy, or extract into a new --out."
            )
        store = Store.create_or_open(out / MANIFEST_NAME)
        try:
            return found, _Repairer(out, store).run(found)
        finally:
            store.close()


class _Repairer:
    def __init__(self, out: Path, store: Store) -> None:
        self._store = store
        self._settings = ShardSettings(
            directory=out / SHARDS_DIRECTORY,
            identity=Identity.from_document(store.identity()),
            shard_bytes=RunOptions.shard_bytes,
            file_mode=RunOptions.file_mode,
        )

    def run(self, found: Audit) -> Repair:
        findings = [finding for finding in found.findings if finding.kind in _DAMAGE]
        names = {finding.shard for finding in findings}
        damaged = {finding.row for finding in findings if finding.row is not None}
        # An open shard is first sealed by the run that fills it: a hole in it would stay one.
        shards = [s for s in self._store.shards() if s.is_sealed and s.name in names]
        kept = planned = 0
        for shard in shards:
            rows = self._store.shard_rows(shard.number)
            num_kept = self._replace(shard, rows, damaged)
            kept += num_kept
            planned += len(rows) - num_kept
        unknown = tuple(f.detail for f in found.findings if f.kind is FindingKind.SHARD_UNKNOWN)
        return Repair(shards=len(shards), kept=kept, planned=planned, unknown=unknown)

    def _replace(self, shard: Shard, rows: Sequence[Row], damaged: Collection[int]) -> int:
        """Move the sound samples of a shard to a new one; how many those were."""
        path = sealed_shard_path(self._settings.directory, shard)
        if not path.exists():
            self._store.forget_stored([row.ordinal for row in rows])
            return 0
        sound = [row for row in rows if row.ordinal not in damaged]
        number = max(other.number for other in self._store.shards()) + 1
        writer = ShardWriter.create(
            self._settings, number=number, expected_samples=max(1, len(sound))
        )
        try:
            self._store.add_shard(writer.shard)
            self._move(writer, rows, path, damaged)
            path.unlink()
            sync_directory(path.parent)
            self._store.drop_shard(shard.number)
            num_kept = writer.num_samples
            if num_kept:
                self._store.seal_shard(number, writer.seal())
            else:
                self._store.drop_shard(number)
                writer.discard()
            return num_kept
        finally:
            writer.close()

    def _move(
        self, writer: ShardWriter, rows: Sequence[Row], path: Path, damaged: Collection[int]
    ) -> None:
        changes: list[Relocated | Forgotten] = []
        source = os.open(path, os.O_RDONLY)
        try:
            for row in rows:
                offset = None if row.ordinal in damaged else writer.append_stored(row, source)
                changes.append(
                    Forgotten(ordinal=row.ordinal)
                    if offset is None
                    else Relocated(ordinal=row.ordinal, shard=writer.shard.number, offset=offset)
                )
        finally:
            os.close(source)
        writer.sync()
        self._store.apply(changes)

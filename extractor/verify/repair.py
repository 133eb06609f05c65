"""Keeps the proven samples of a damaged data set; the next run extracts the others again.

The sound samples of a damaged shard go to a new one: copy (and prove once more), fdatasync, one
manifest commit, unlink. A crash leaves nothing that the next run or repair does not settle.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from extractor.core.errors import CorruptData, UsageError, storage_error
from extractor.core.humanize import counted
from extractor.core.identity import Identity
from extractor.core.locations import DATASET_NAME, MANIFEST_NAME
from extractor.core.run_options import DEFAULT_SHARD_BYTES
from extractor.shards.dataset import dataset_document
from extractor.shards.output_dir import OutputDirectory, mode_of_files
from extractor.shards.recovery import ManifestLost
from extractor.shards.writer import ShardSettings, ShardWriter
from extractor.status.live_file import LIVE_NAME
from extractor.system.lock import exclusive
from extractor.verify.audit import audit, open_manifest
from extractor.verify.findings import Audit, FindingKind, Findings, Progress
from manifest.exceptions import ManifestDamaged, ManifestError, ManifestSpaceError
from manifest.records import Forgotten, Relocated, Shard, StoredRow
from manifest.store import Store
from server_patch.directory import Directory

_ADVICE = (
    "Nothing was changed. Only the manifest knew what it held: restore it from a copy, or extract "
    "into a new --out."
)


@dataclass(kw_only=True)
class Repair:
    """The changes made by a repair."""

    shards: int = 0  # damaged ones, replaced or given up
    kept: int = 0  # sound samples of these
    planned: int = 0  # samples that the next run extracts again
    unknown: list[str] = field(default_factory=list)  # files of another origin: left alone
    rows: int = 0  # damaged manifest rows, which the next run reads from the input again
    refused: str | None = None  # the reason why nothing was changed
    manifest: bool = False  # whether indexes and counts of the manifest were made again
    dataset: bool = False  # whether dataset.json was written again

    def to_document(self) -> dict[str, Any]:
        """The part of the JSON of `extractor verify --repair`."""
        return asdict(self)

    def to_text(self) -> str:
        lines = []
        if self.refused is not None:
            lines.append(f"not repaired: {self.refused}")
        if self.rows:
            lines.append(
                f"dropped {counted(self.rows, 'damaged row')} from the manifest, to be read and "
                "extracted again by the same `extractor run`"
            )
        if self.manifest:
            lines.append("made the indexes and counts of the manifest again from its rows")
        if self.dataset:
            lines.append(f"wrote {DATASET_NAME} again from the manifest")
        if self.shards:
            lines.append(
                f"repaired {counted(self.shards, 'shard')}: {counted(self.kept, 'sample')} kept, "
                f"{self.planned:,} to be extracted again by the same `extractor run`"
            )
        lines = lines or ["nothing to repair"]
        if self.unknown:
            lines.append(
                f"left alone {counted(len(self.unknown), 'file')} that this data set did not "
                "write; move away or remove by hand, and repair again: " + ", ".join(self.unknown)
            )
        return "\n".join(lines)


def audit_and_repair(out: Path, *, progress: Progress = lambda _: None) -> tuple[Audit, Repair]:
    """Check a data set and replace its damaged shards.

    Raises OutputBusy while a run writes it, ManifestMissing if there is no data set, UsageError if
    the directory cannot be written, SpaceError, ManifestError for a manifest of another version.
    """
    # First, so that no lock is left in a directory that is no data set.
    with suppress(ManifestDamaged, ManifestLost):
        open_manifest(out).close()
    try:
        file_mode, _ = mode_of_files(out, asked=None)
        with ExitStack() as stack:
            directory = stack.enter_context(exclusive(out, file_mode=file_mode))
            found = audit(out, progress=progress)
            try:
                output = stack.enter_context(OutputDirectory.opened(directory, file_mode=file_mode))
            except UsageError as error:
                return found, Repair(refused=str(error))
            return found, _repair(output, found)
    except OSError as error:
        raise storage_error(error, where=out) from error


def _repair(output: OutputDirectory, found: Audit) -> Repair:
    out = output.out.path
    try:
        open_manifest(out).close()
        store = Store.create_or_open(out / MANIFEST_NAME)
    except (ManifestDamaged, ManifestLost) as error:
        return Repair(refused=f"{error} {_ADVICE}")
    with closing(store):
        try:
            repairer = _Repairer(output, store, found.findings)
            repairer.mend_manifest()
        except ManifestSpaceError:
            raise
        except (ManifestError, CorruptData, UsageError) as error:
            return Repair(refused=f"{error} {_ADVICE}")
        repairer.replace_shards()
        repairer.write_dataset()
        repairer.remove_live_file()
        return repairer.repair


class _Repairer:
    def __init__(self, output: OutputDirectory, store: Store, findings: Findings) -> None:
        self.repair = Repair()
        self._output = output
        self._store = store
        self._findings = findings
        self._settings = ShardSettings(
            directory=output.shards,
            file_mode=output.file_mode,
            shard_bytes=DEFAULT_SHARD_BYTES,
            identity=Identity.from_document(store.identity()),
        )

    def mend_manifest(self) -> None:
        """Drop damaged rows, and make indexes and counts from the others."""
        if FindingKind.MANIFEST_DAMAGED in self._findings.counts:
            rows = self._findings.damaged_rows
            self._store.mend(drop=rows)
            self.repair.rows, self.repair.manifest = len(rows), True

    def write_dataset(self) -> None:
        """Write a damaged `dataset.json` from the manifest, if that holds all of it."""
        is_wrong = FindingKind.PROVENANCE in self._findings.counts
        if not is_wrong or self._is_strange(self._output.out, DATASET_NAME):
            return
        if starts := self._store.server_starts():
            self._output.write(DATASET_NAME, dataset_document(self._settings.identity, starts))
            self.repair.dataset = True

    def remove_live_file(self) -> None:
        out = self._output.out
        if FindingKind.LIVE_DAMAGED in self._findings.counts and out.is_regular(LIVE_NAME):
            out.unlink(LIVE_NAME)

    def replace_shards(self) -> None:
        """Replace the damaged shards by their sound samples."""
        self.repair.unknown += [
            found.detail for found in self._findings.all if found.kind is FindingKind.SHARD_UNKNOWN
        ]
        for shard in self._store.shards():
            # An open shard is first sealed by the run that fills it: a hole in it would stay one.
            if not shard.is_sealed or shard.number not in self._findings.damaged_shards:
                continue
            if self._is_strange(self._settings.directory, shard.name):
                continue
            rows = self._store.shard_rows(shard.number)
            num_kept = self._replace(shard, rows, self._findings.damaged_samples)
            self.repair.shards += 1
            self.repair.kept += num_kept
            self.repair.planned += len(rows) - num_kept

    def _is_strange(self, directory: Directory, name: str) -> bool:
        """Whether something that this tool did not write has the name, to be left alone."""
        is_strange = directory.exists(name) and not directory.is_regular(name)
        if is_strange:
            self.repair.unknown.append(str(directory.path / name))
        return is_strange

    def _replace(self, shard: Shard, rows: Sequence[StoredRow], damaged: Collection[int]) -> int:
        """Move the sound samples of a shard to a new one; return their number."""
        directory = self._settings.directory
        if not directory.exists(shard.name):
            self._store.forget_stored([row.ordinal for row in rows])
            return 0
        sound = [row for row in rows if row.ordinal not in damaged]
        number = max(other.number for other in self._store.shards()) + 1
        writer = ShardWriter.create(
            self._settings, number=number, expected_samples=max(1, len(sound))
        )
        try:
            self._store.add_shard(writer.shard)
            self._move(writer, rows, shard, damaged)
            directory.unlink(shard.name)
            directory.sync()
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
        self, writer: ShardWriter, rows: Sequence[StoredRow], shard: Shard, damaged: Collection[int]
    ) -> None:
        changes: list[Relocated | Forgotten] = []
        source, _ = self._settings.directory.open_file(shard.name)
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

"""`extractor verify`: proves a data set from its shards and its manifest alone."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from extractor.config import DATASET_NAME, MANIFEST_NAME, SHARDS_DIRECTORY, Identity, Layout
from extractor.copying import BLOCK_BYTES
from extractor.dataset import dataset_document
from extractor.errors import CorruptData
from extractor.files import blocks, read_into
from extractor.lock import writer_of
from extractor.report import totals_document, totals_table
from extractor.shard_format import (
    decode_shard_header,
    sample_tensors,
    shard_digest,
    shard_metadata,
    tensor_name,
)
from extractor.shards import open_shard_path, sealed_shard_path
from extractor.strays import require_begun, require_manifest
from extractor.tables import amount, counted, table
from extractor.verify import check_finite
from manifest.causes import LIMIT_ERRNOS
from manifest.records import Row, Shard, Totals
from manifest.store import Store
from prompts.types import prompt_key

#: Findings that are printed; `--json` has all.
SHOWN_FINDINGS = 20


class FindingKind(StrEnum):
    """What may be wrong with a data set: the closed list."""

    MANIFEST_DAMAGED = "manifest_damaged"
    ROWS_UNACCOUNTED = "rows_unaccounted"  # an input row that the manifest does not have
    ROW_UNFINISHED = "row_unfinished"  # neither stored nor failed yet
    SHARD_MISSING = "shard_missing"
    SHARD_UNSEALED = "shard_unsealed"
    SHARD_HEADER = "shard_header"  # says something else than the manifest
    SHARD_SIZE = "shard_size"
    SHARD_DIGEST = "shard_digest"  # header or samples are others than those that were sealed
    SHARD_UNKNOWN = "shard_unknown"  # a file that the manifest does not know
    SAMPLE_OVERLAP = "sample_overlap"
    SAMPLE_SIZE = "sample_size"  # its extent does not fit its number of tokens
    SAMPLE_DIGEST = "sample_digest"
    SAMPLE_TOKENS = "sample_tokens"  # ids and mask are not those of the prompt
    SAMPLE_NONFINITE = "sample_nonfinite"
    PROVENANCE = "provenance"  # dataset.json is missing or says something else


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong."""

    kind: FindingKind
    detail: str
    row: int | None = None  # ordinal
    shard: str | None = None


@dataclass(kw_only=True)
class Audit:
    """What `verify` saw."""

    totals: Totals
    num_input_rows: int
    num_shards: int
    duplicates: int = 0  # stored samples whose ids and mask another one has too
    samples_checked: int = 0
    bytes_checked: int = 0
    is_fast: bool = False
    writer: int | None = None  # pid of a process that wrote the data set when this began
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not self.findings

    def to_document(self) -> dict[str, Any]:
        """The stable JSON of `extractor verify --json`."""
        return {
            "clean": self.is_clean,
            "fast": self.is_fast,
            "writer": self.writer,
            "input_rows": self.num_input_rows,
            **totals_document(self.totals),
            "duplicates": self.duplicates,
            "shards": self.num_shards,
            "samples_checked": self.samples_checked,
            "bytes_checked": self.bytes_checked,
            "findings": [asdict(finding) for finding in self.findings],
        }

    def to_text(self) -> str:
        """What `extractor verify` prints: rows, what was checked, and the first findings."""
        unread = self.num_input_rows - self.totals.num_rows
        lines = [
            totals_table(self.totals, num_unread=max(0, unread)),
            table(
                [
                    ("duplicates", f"{self.duplicates:,}"),
                    ("shards", f"{self.num_shards:,}"),
                    ("samples checked", f"{self.samples_checked:,}"),
                    ("bytes checked", amount(self.bytes_checked)),
                ]
            ),
        ]
        lines += [f"FINDING  {kind}: {n:,}" for kind, n in self.findings_by_kind().items()]
        for finding in self.findings[:SHOWN_FINDINGS]:
            where = "" if finding.row is None else f" row {finding.row}"
            where += "" if finding.shard is None else f" in {finding.shard}"
            lines.append(f"  {finding.kind}{where}: {finding.detail}")
        if len(self.findings) > SHOWN_FINDINGS:
            hidden = len(self.findings) - SHOWN_FINDINGS
            lines.append(f"  … and {hidden:,} more: --json lists all")
        if self.writer is not None:
            lines.append(
                f"process {self.writer} is writing this data set: what it has not finished is no "
                "damage; verify again when it has ended"
            )
        lines.append("clean" if self.is_clean else counted(len(self.findings), "finding"))
        return "\n".join(lines)

    def findings_by_kind(self) -> dict[FindingKind, int]:
        return dict(sorted(Counter(finding.kind for finding in self.findings).items()))


Progress = Callable[[int], None]
"""Called with the number of samples checked since the last call."""


def open_manifest(out: Path) -> Store:
    """The manifest of a data set, for reading. Raises as `audit` does."""
    require_manifest(out)
    store = Store.open_read_only(out / MANIFEST_NAME)
    try:
        if not store.identity():
            require_begun(out)
    except BaseException:
        store.close()
        raise
    return store


def audit(out: Path, *, fast: bool = False, progress: Progress = lambda _: None) -> Audit:
    """Check a data set. `fast` leaves out the states' bytes: digests and finiteness.

    Raises UsageError for shards whose manifest is lost, ManifestMissing where there is no data
    set, ManifestError for one of another version.
    """
    writer = writer_of(out)  # before the manifest: it may end while that is read
    store = open_manifest(out)
    try:
        return _Auditor(out, store, fast=fast, progress=progress, writer=writer).run()
    finally:
        store.close()


class _Auditor:
    def __init__(
        self, out: Path, store: Store, *, fast: bool, progress: Progress, writer: int | None
    ) -> None:
        self._out = out
        self._directory = out / SHARDS_DIRECTORY
        self._store = store
        self._fast = fast
        self._progress = progress
        self._identity = Identity.from_document(store.identity())
        self._layout: Layout = self._identity.layout
        self._block = memoryview(bytearray(BLOCK_BYTES))
        self._audit = Audit(
            totals=store.totals(),
            num_input_rows=sum(source.num_rows for source in store.sources()),
            num_shards=0,
            is_fast=fast,
            writer=writer,
        )
        self._remedy = (
            "run the same command again" if writer is None else f"process {writer} is at it"
        )

    def run(self) -> Audit:
        for problem in self._store.integrity_problems():
            self._find(FindingKind.MANIFEST_DAMAGED, problem)
        self._check_rows()
        self._audit.duplicates = self._store.count_duplicates()
        self._check_provenance()
        shards = self._store.shards()
        self._audit.num_shards = len(shards)
        for shard in shards:
            self._check_shard(shard)
        self._check_unknown_files(shards)
        return self._audit

    def _find(
        self,
        kind: FindingKind,
        detail: str,
        *,
        row: int | None = None,
        shard: Shard | None = None,
    ) -> None:
        self._audit.findings.append(
            Finding(kind=kind, detail=detail, row=row, shard=shard.name if shard else None)
        )

    # --- the manifest ------------------------------------------------------------------------

    def _check_rows(self) -> None:
        expected = 0
        for row in self._store.rows():
            if row.ordinal != expected:
                self._find(
                    FindingKind.ROWS_UNACCOUNTED,
                    f"rows {expected} to {row.ordinal - 1} are missing from the manifest",
                )
            expected = row.ordinal + 1
            if not row.state.is_terminal:
                self._find(
                    FindingKind.ROW_UNFINISHED,
                    f"line {row.line} is {row.state}; {self._remedy}",
                    row=row.ordinal,
                )
        if expected != self._audit.num_input_rows:
            self._find(
                FindingKind.ROWS_UNACCOUNTED,
                f"the input has {self._audit.num_input_rows} rows, the manifest knows the first "
                f"{expected}; {self._remedy}",
            )

    def _check_provenance(self) -> None:
        path = self._out / DATASET_NAME
        try:
            stated = path.read_bytes()
        except OSError as error:
            if error.errno in LIMIT_ERRNOS:
                raise
            self._find(FindingKind.PROVENANCE, f"{path}: {error.strerror}")
            return
        if stated != dataset_document(self._identity, self._store.server_starts()):
            self._find(FindingKind.PROVENANCE, f"{path} differs from what the manifest says")

    # --- shards ------------------------------------------------------------------------------

    def _check_shard(self, shard: Shard) -> None:
        num_findings = len(self._audit.findings)
        rows = self._store.shard_rows(shard.number)
        path = sealed_shard_path(self._directory, shard)
        if not shard.is_sealed:
            self._find(
                FindingKind.SHARD_UNSEALED,
                f"the run that fills it has not finished; {self._remedy}",
                shard=shard,
            )
            if not path.exists():
                path = open_shard_path(self._directory, shard)
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            if error.errno in LIMIT_ERRNOS:
                raise
            self._find(
                FindingKind.SHARD_MISSING,
                f"{path}: {error.strerror}; lost: {counted(len(rows), 'sample')}",
                shard=shard,
            )
            return
        try:
            size = os.fstat(descriptor).st_size
            if shard.is_sealed:
                self._check_size(shard, size)
                self._check_header(shard, rows, descriptor, size)
            self._check_extents(shard, rows)
            for row in rows:
                self._check_sample(shard, row, descriptor, size)
                self._progress(1)
            if shard.is_sealed and len(self._audit.findings) == num_findings:
                # Says no more than the others where they found something.
                self._check_digest(shard, rows, descriptor, size)
        finally:
            os.close(descriptor)

    def _check_size(self, shard: Shard, size: int) -> None:
        if size != shard.size_bytes:
            self._find(
                FindingKind.SHARD_SIZE,
                f"{size} bytes, must be {shard.size_bytes}",
                shard=shard,
            )

    def _check_header(self, shard: Shard, rows: list[Row], descriptor: int, size: int) -> None:
        data = _beginning(shard, descriptor, size)
        try:
            header = decode_shard_header(data)
        except CorruptData as error:
            self._find(FindingKind.SHARD_HEADER, str(error), shard=shard)
            return
        if header.pop("__metadata__", None) != shard_metadata(self._identity):
            self._find(
                FindingKind.SHARD_HEADER,
                "its metadata differs from what the manifest says",
                shard=shard,
            )
        for row in rows:
            for tensor in sample_tensors(row.num_tokens or 0, self._layout):
                name = tensor_name(row.ordinal, tensor.name)
                expected = tensor.entry((row.offset or 0) - shard.data_start)
                if (stated := header.pop(name, None)) != expected:
                    self._find(
                        FindingKind.SHARD_HEADER,
                        f"{name} is stated as {stated}, must be {expected}",
                        row=row.ordinal,
                        shard=shard,
                    )
        if header:
            names = ", ".join(sorted(header)[:5])
            self._find(
                FindingKind.SHARD_HEADER,
                f"{counted(len(header), 'unknown tensor')}: {names}",
                shard=shard,
            )

    def _check_digest(self, shard: Shard, rows: list[Row], descriptor: int, size: int) -> None:
        header = xxhash.xxh3_128(_beginning(shard, descriptor, size))
        digest = shard_digest(header, (row.digest or "" for row in rows))
        if shard.digest is not None and digest != shard.digest:
            self._find(
                FindingKind.SHARD_DIGEST,
                f"header and samples have digest {digest}, sealed was {shard.digest}",
                shard=shard,
            )

    def _check_extents(self, shard: Shard, rows: list[Row]) -> None:
        position = shard.data_start
        for row in rows:
            if row.offset != position:
                self._find(
                    FindingKind.SAMPLE_OVERLAP,
                    f"begins at byte {row.offset}, the one before ends at {position}",
                    row=row.ordinal,
                    shard=shard,
                )
            position = (row.offset or 0) + (row.size_bytes or 0)

    # --- samples -----------------------------------------------------------------------------

    def _check_sample(self, shard: Shard, row: Row, descriptor: int, size: int) -> None:
        num_tokens, offset, size_bytes = row.num_tokens or 0, row.offset or 0, row.size_bytes or 0
        tensors = {tensor.name: tensor for tensor in sample_tensors(num_tokens, self._layout)}
        end = max(tensor.end for tensor in tensors.values())
        if size_bytes != end or offset + end > size:
            self._find(
                FindingKind.SAMPLE_SIZE,
                f"{size_bytes} bytes at {offset} of {size}; {num_tokens} tokens take {end}",
                row=row.ordinal,
                shard=shard,
            )
            return
        self._audit.samples_checked += 1
        tokens_begin = tensors["input_ids"].begin
        tokens = bytearray(end - tokens_begin)
        if not self._fast:
            digest = xxhash.xxh3_128()
            for name in self._layout.state_names:
                begin, stop = offset + tensors[name].begin, offset + tensors[name].end
                for block, at in blocks(descriptor, begin, stop, self._block):
                    digest.update(block)
                    failure = check_finite(block, at=at, name=name, start=0, layout=self._layout)
                    if failure is not None:
                        self._find(
                            FindingKind.SAMPLE_NONFINITE,
                            failure.detail,
                            row=row.ordinal,
                            shard=shard,
                        )
        read_into(descriptor, memoryview(tokens), offset + tokens_begin)
        self._check_tokens(shard, row, tokens)
        if not self._fast:
            self._audit.bytes_checked += size_bytes
            digest.update(tokens)
            if digest.hexdigest() != row.digest:
                self._find(
                    FindingKind.SAMPLE_DIGEST,
                    f"its bytes have digest {digest.hexdigest()}, stored were {row.digest}",
                    row=row.ordinal,
                    shard=shard,
                )

    def _check_tokens(self, shard: Shard, row: Row, tokens: bytearray) -> None:
        ids, mask = np.frombuffer(tokens, dtype="<i4").reshape(2, -1)
        is_mask = bool(((mask == 0) | (mask == 1)).all())
        if not is_mask or prompt_key(ids, mask) != row.key:
            self._find(
                FindingKind.SAMPLE_TOKENS,
                "ids and mask are not those of the prompt",
                row=row.ordinal,
                shard=shard,
            )
        elif (ids < 0).any() or (ids >= self._identity.vocab_size).any():
            self._find(
                FindingKind.SAMPLE_TOKENS,
                f"ids outside the vocabulary of {self._identity.vocab_size}",
                row=row.ordinal,
                shard=shard,
            )

    def _check_unknown_files(self, shards: list[Shard]) -> None:
        known = {shard.name for shard in shards}
        known |= {open_shard_path(self._directory, shard).name for shard in shards}
        names = set(os.listdir(self._directory)) if self._directory.exists() else set()
        for name in sorted(names - known):
            self._find(FindingKind.SHARD_UNKNOWN, f"{self._directory / name}")


def _beginning(shard: Shard, descriptor: int, size: int) -> bytes:
    """The header of a shard with all the room that was kept for it."""
    data = bytearray(min(shard.data_start, size))
    read_into(descriptor, memoryview(data), 0)
    return bytes(data)

"""Proves a data set from its shards and its manifest alone, for `extractor verify`.

Both are untrusted: every value and size is checked before use; what is unreadable is a finding.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

import orjson

from extractor.core.humanize import counted
from extractor.core.identity import Identity
from extractor.core.locations import DATASET_NAME, MANIFEST_NAME, SHARDS_DIRECTORY
from extractor.shards.dataset import dataset_document
from extractor.shards.recovery import ManifestLost, require_begun, require_manifest
from extractor.shards.sample_copy import BLOCK_BYTES
from extractor.shards.writer import open_shard_name
from extractor.status.live_file import live_problem
from extractor.system.lock import writer_of
from extractor.verify.findings import Audit, FindingKind, Progress
from extractor.verify.manifest_audit import ManifestAuditor
from extractor.verify.shard_audit import ShardAuditor
from manifest.causes import LIMIT_ERRNOS
from manifest.decoding import shown
from manifest.exceptions import ManifestDamaged
from manifest.records import Shard
from manifest.store import Store
from server_patch.directory import Directory

_MAX_DATASET_BYTES = 16 << 20
_MAX_DIFFERENCES = 100


def open_manifest(out: Path) -> Store:
    """Open the manifest of a data set, read-only. Raises as `audit` does, and ManifestDamaged."""
    require_manifest(out)
    store = Store.open_read_only(out / MANIFEST_NAME)
    try:
        if not store.has_begun():
            require_begun(out)
            Identity.from_document({})  # raises
    except BaseException:
        store.close()
        raise
    return store


def audit(out: Path, *, fast: bool = False, progress: Progress = lambda _: None) -> Audit:
    """Check a data set. `fast` leaves out the states' bytes: digests and finiteness.

    Damage of any kind is reported in the result. Raises ManifestMissing if there is no data set,
    ManifestError for a manifest of a newer version.
    """
    # Look for a writer before reading the manifest: it may exit in the meantime.
    found = Audit(is_fast=fast, writer=writer_of(out))
    try:
        store = open_manifest(out)
    except (ManifestDamaged, ManifestLost) as error:
        found.findings.find(FindingKind.MANIFEST_DAMAGED, str(error))
        return found
    try:
        with Directory.open(out) as directory:
            _Auditor(directory, store, found, progress=progress).run()
        return found
    finally:
        store.close()


class _Auditor:
    def __init__(self, out: Directory, store: Store, found: Audit, *, progress: Progress) -> None:
        self._out = out
        self._store = store
        self._progress = progress
        self._block = memoryview(bytearray(BLOCK_BYTES))
        self._audit = found
        self._find = found.findings.find
        self._manifest = ManifestAuditor(store, found.findings, remedy=found.remedy)

    def run(self) -> None:
        self._manifest.run()
        self._audit.contents = self._manifest.contents
        self._manifest.survives(self._check_samples)
        self._check_unknown_files()
        if (problem := live_problem(self._out.path)) is not None:
            self._find(FindingKind.LIVE_DAMAGED, problem)

    def _check_samples(self) -> None:
        """Run the checks that need the identity: provenance, shards and their samples."""
        identity = self._manifest.identity()
        if identity is None:
            return
        self._check_provenance(identity)
        for shard in self._manifest.shards:
            try:
                self._check_shard(shard, identity)
            except (OSError, EOFError) as error:
                self._find(
                    FindingKind.SHARD_MISSING, f"{shard.name} cannot be read: {error}", shard=shard
                )

    def _check_provenance(self, identity: Identity) -> None:
        path, starts = self._out.path / DATASET_NAME, self._manifest.contents.starts
        try:
            stated = self._out.read(DATASET_NAME, max_bytes=_MAX_DATASET_BYTES)
        except OSError as error:
            if error.errno in LIMIT_ERRNOS:
                raise
            self._find(FindingKind.PROVENANCE, f"{path}: {error.strerror}")
            return
        try:
            document = orjson.loads(stated)
        except ValueError as error:
            self._find(FindingKind.PROVENANCE, f"{path} is not JSON: {error}")
            return
        if not isinstance(document, dict):
            self._find(FindingKind.PROVENANCE, f"{path} is not a JSON object")
            return
        try:
            # Whatever the order of its keys, which other versions wrote differently.
            is_canonical = stated == orjson.dumps(document, option=orjson.OPT_INDENT_2)
        except TypeError as error:
            self._find(FindingKind.PROVENANCE, f"{path} cannot be compared: {error}")
            return
        expected = orjson.loads(dataset_document(identity, starts))
        if not starts:
            # An older version wrote it and recorded no starts: the manifest lacks these fields.
            for name in ("engine_version", "tool_version", "sessions"):
                expected.pop(name)
                document.pop(name, None)
        differs = False
        for name, one, other in islice(_differences(document, expected), _MAX_DIFFERENCES):
            differs = True
            self._find(
                FindingKind.PROVENANCE, f"{path}: {name} is {one}, the manifest says {other}"
            )
        if starts and not differs and not is_canonical:
            self._find(FindingKind.PROVENANCE, f"{path} is not written as this tool writes it")

    def _check_shard(self, shard: Shard, identity: Identity) -> None:
        if not shard.is_sealed:
            self._find(
                FindingKind.SHARD_UNSEALED,
                f"the run that fills it has not finished; {self._audit.remedy}",
                shard=shard,
            )
        try:
            descriptor = self._opened(shard)
        except OSError as error:
            if error.errno in LIMIT_ERRNOS:
                raise
            lost = counted(shard.num_samples, "sample")
            self._find(
                FindingKind.SHARD_MISSING,
                f"{error.filename}: {error.strerror}; lost: {lost}",
                shard=shard,
            )
            return
        try:
            auditor = ShardAuditor(
                self._audit, shard, identity, descriptor, block=self._block, progress=self._progress
            )
            rows = self._store.checked_shard_rows(shard.number)
            auditor.run(rows, skip=self._audit.findings.damaged_rows)
        finally:
            os.close(descriptor)

    def _opened(self, shard: Shard) -> int:
        with self._out.subdirectory(SHARDS_DIRECTORY) as directory:
            is_open = not shard.is_sealed and not directory.exists(shard.name)
            descriptor, _ = directory.open_file(open_shard_name(shard) if is_open else shard.name)
            return descriptor

    def _check_unknown_files(self) -> None:
        known = {shard.name for shard in self._manifest.shards}
        known |= {open_shard_name(shard) for shard in self._manifest.shards}
        try:
            with self._out.subdirectory(SHARDS_DIRECTORY) as directory:
                names = set(directory.names())
        except FileNotFoundError:
            return
        except OSError as error:
            path = self._out.path / SHARDS_DIRECTORY
            self._find(FindingKind.SHARD_UNKNOWN, f"{path}: {error.strerror}")
            return
        for name in sorted(names - known):
            self._find(FindingKind.SHARD_UNKNOWN, f"{directory.path / name}")


def _differences(one: object, other: object, place: str = "") -> Iterator[tuple[str, str, str]]:
    """Where two JSON values differ, and both values there."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in sorted({*one, *other}):
            inner = f"{place}.{name}" if place else str(name)
            if name in one and name in other:
                yield from _differences(one[name], other[name], inner)
            else:
                yield inner, _stated(one, name), _stated(other, name)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, pair in enumerate(zip(one, other, strict=True)):
            yield from _differences(*pair, f"{place}[{index}]")
    elif orjson.dumps(one) != orjson.dumps(other):
        yield place, shown(one), shown(other)


def _stated(document: Mapping[str, object], name: str) -> str:
    return shown(document[name]) if name in document else "missing"

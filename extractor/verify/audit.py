"""`extractor verify`: proves a data set from its shards and its manifest alone.

Both are untrusted: every value is checked before it is used, sizes are compared with the file
before anything is read into memory, and unreadable data is reported as a finding.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path

import orjson

from extractor.core.errors import CorruptData, UsageError
from extractor.core.humanize import counted
from extractor.core.identity import Identity
from extractor.core.locations import DATASET_NAME, MANIFEST_NAME, SHARDS_DIRECTORY
from extractor.servers.canary import ids_of
from extractor.shards.dataset import dataset_document
from extractor.shards.format import shard_name
from extractor.shards.sample_copy import BLOCK_BYTES
from extractor.shards.strays import ManifestLost, require_begun, require_manifest
from extractor.shards.writer import open_shard_path, sealed_shard_path
from extractor.status.live_file import live_problem
from extractor.system.files import open_regular, read_regular
from extractor.system.lock import writer_of
from extractor.verify.findings import Audit, FindingKind, Progress
from extractor.verify.shard_audit import ShardAuditor
from manifest.causes import LIMIT_ERRNOS
from manifest.decoding import Damage, as_json, shown
from manifest.exceptions import ManifestDamaged
from manifest.records import PromptFacts, Row, ServerStart, Shard, StoredSample
from manifest.states import State
from manifest.store import Store
from prompts.types import Alteration
from server_patch.dump_format import DumpFormatError

_MAX_DATASET_BYTES = 16 << 20
_MAX_DIFFERENCES = 100
_ALTERATIONS = frozenset(Alteration)
_DIGEST = re.compile("[0-9a-f]{32}")


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
        found.find(FindingKind.MANIFEST_DAMAGED, str(error))
        return found
    try:
        _Auditor(out, store, found, progress=progress).run()
        return found
    finally:
        store.close()


class _Auditor:
    def __init__(self, out: Path, store: Store, found: Audit, *, progress: Progress) -> None:
        self._out = out
        self._directory = out / SHARDS_DIRECTORY
        self._store = store
        self._progress = progress
        self._block = memoryview(bytearray(BLOCK_BYTES))
        self._audit = found
        self._find = found.find
        self._num_sources = 0
        self._starts: list[ServerStart] = []
        self._shards: list[Shard] = []
        writer = found.writer
        self._remedy = (
            "run the same command again" if writer is None else f"process {writer} is at it"
        )

    def run(self) -> None:
        self._store.limit_work()
        is_sound = self._survives(self._check_file)
        for step in (
            self._read_sources,
            self._read_starts,
            self._check_canaries,
            self._read_shards,
            self._read_totals,
            self._check_rows,
        ):
            self._survives(step)
        if is_sound:  # in a damaged file, sums over all rows may never end
            self._survives(self._check_sums)
        self._survives(self._check_samples)
        self._check_unknown_files()
        if (problem := live_problem(self._out)) is not None:
            self._find(FindingKind.LIVE_DAMAGED, problem)

    def _survives(self, step: Callable[[], None]) -> bool:
        """Whether a step completed without a finding about the manifest itself."""
        before = self._audit.counts[FindingKind.MANIFEST_DAMAGED]
        try:
            step()
        except ManifestDamaged as error:
            self._find(FindingKind.MANIFEST_DAMAGED, str(error))
        return self._audit.counts[FindingKind.MANIFEST_DAMAGED] == before

    # --- the manifest ------------------------------------------------------------------------

    def _check_file(self) -> None:
        for problem in self._store.integrity_problems():
            self._find(FindingKind.MANIFEST_DAMAGED, problem)

    def _read_sources(self) -> None:
        sources = self._store.checked_sources()
        self._num_sources = len(sources)
        for number, source in enumerate(sources):
            if isinstance(source, Damage):
                self._find(FindingKind.MANIFEST_DAMAGED, str(source))
                continue
            self._audit.num_input_rows += source.num_rows
            if source.number != number or not _is_digest(source.digest):
                self._find(
                    FindingKind.MANIFEST_DAMAGED,
                    f"sources, row {source.number}: must be number {number}, and its digest "
                    f"{shown(source.digest)} 32 hexadecimal digits",
                )

    def _read_starts(self) -> None:
        session = 0
        for number, start in enumerate(self._store.checked_server_starts()):
            if isinstance(start, Damage):
                self._find(FindingKind.MANIFEST_DAMAGED, str(start))
                continue
            if start.number != number or start.session not in (session, session + 1):
                self._find(
                    FindingKind.MANIFEST_DAMAGED,
                    f"server_starts, row {start.number}: must be number {number}, and its session "
                    f"{start.session} {session} or the next",
                )
            session = start.session
            self._starts.append(start)
        self._audit.starts = tuple(self._starts)

    def _check_canaries(self) -> None:
        numbers = set()
        for number, canary in self._store.checked_canaries():
            numbers.add(number)
            if isinstance(canary, Damage):
                self._find(FindingKind.MANIFEST_DAMAGED, str(canary))
                continue
            try:
                ids_of(canary)
            except DumpFormatError as error:
                self._find(FindingKind.MANIFEST_DAMAGED, f"canaries, row {number}: {error}")
        references = {start.number for start in self._starts if start.accepted or not start.number}
        for number in sorted(numbers ^ references):
            self._find(
                FindingKind.MANIFEST_DAMAGED,
                f"canaries, row {number}: there must be one for the first start and for each that "
                "was let differ, and no other",
            )

    def _read_shards(self) -> None:
        records = self._store.checked_shards()
        self._audit.num_shards = len(records)
        for shard in records:
            if isinstance(shard, Damage):
                self._find(FindingKind.MANIFEST_DAMAGED, str(shard))
                continue
            if shard.name != (name := shard_name(shard.number)):
                # Do not open the file under the recorded name: it may point anywhere.
                self._find(
                    FindingKind.MANIFEST_DAMAGED,
                    f"shards, row {shard.number}: name is {shown(shard.name)}, must be {name}",
                )
            self._shards.append(replace(shard, name=name))

    def _read_totals(self) -> None:
        self._audit.totals = self._store.totals()

    def _check_sums(self) -> None:
        for problem in self._store.tally_problems():
            self._find(FindingKind.MANIFEST_DAMAGED, problem)
        self._audit.duplicates = self._store.count_duplicates()

    def _check_rows(self) -> None:
        expected = 0
        place = (0, 0)  # source and line of the row before
        shards = {shard.number for shard in self._shards}
        for row in self._store.checked_rows():
            ordinal = expected if row.ordinal is None else row.ordinal
            if ordinal != expected:
                self._find(
                    FindingKind.ROWS_UNACCOUNTED,
                    f"rows {expected} to {ordinal - 1} are missing from the manifest",
                )
            expected = ordinal + 1
            problem: str | None
            if isinstance(row, Damage):
                problem = row.detail
            else:
                problem = self._problem_of(row, place, shards)
                place = (row.origin.source, row.origin.line)
                if row.sample is not None:
                    self._audit.num_unattributed += row.sample.server is None
                if not row.state.is_terminal:
                    self._find(
                        FindingKind.ROW_UNFINISHED,
                        f"line {row.origin.line} is {row.state}; {self._remedy}",
                        row=ordinal,
                    )
            if problem is not None:
                self._audit.damage.rows.add(ordinal)
                self._find(FindingKind.MANIFEST_DAMAGED, problem, row=ordinal)
        if expected != self._audit.num_input_rows:
            self._find(
                FindingKind.ROWS_UNACCOUNTED,
                f"the input has {self._audit.num_input_rows} rows, the manifest knows the first "
                f"{expected}; {self._remedy}",
            )

    def _problem_of(self, row: Row, place: tuple[int, int], shards: set[int]) -> str | None:
        """The problem with a row whose columns decode; None if there is none."""
        origin, prompt, sample = row.origin, row.prompt, row.sample
        source, line = here = origin.source, origin.line
        if source >= self._num_sources:
            return f"source is {source}, there are {self._num_sources}"
        if line < 1 or here < place:
            return f"line {line} of source {source} is behind line {place[1]} of {place[0]}"
        if origin.label is not None and not _is_json(origin.label):
            return f"label is {shown(origin.label)}, must be JSON"
        if row.state is State.FAILED and row.detail is None:
            return "it failed without a detail"
        problem = None if prompt is None else _problem_of_prompt(prompt)
        if problem is None and sample is not None:
            problem = self._problem_of_place(sample, shards)
        return problem

    def _problem_of_place(self, sample: StoredSample, shards: set[int]) -> str | None:
        if not _is_digest(sample.digest):
            return f"digest is {shown(sample.digest)}, must be 32 hexadecimal digits"
        if sample.server is not None and sample.server >= len(self._starts):
            return f"server is {sample.server}, there are {len(self._starts)}"
        if sample.shard not in shards:
            return f"shard is {sample.shard}, which is not among the shards"
        return None

    def _check_samples(self) -> None:
        """Run the checks that need the identity: provenance, shards and their samples."""
        fields: dict[str, object] = {}
        for record in self._store.checked_identity():
            if isinstance(record, Damage):
                self._find(FindingKind.MANIFEST_DAMAGED, str(record))
            else:
                fields[record["name"]] = record["value"]
        try:
            identity = Identity.from_document(fields)
        except (UsageError, CorruptData) as error:
            self._find(FindingKind.MANIFEST_DAMAGED, f"identity: {error}")
            return
        self._check_provenance(identity)
        for shard in self._shards:
            try:
                self._check_shard(shard, identity)
            except (OSError, EOFError) as error:
                self._find(
                    FindingKind.SHARD_MISSING, f"{shard.name} cannot be read: {error}", shard=shard
                )

    def _check_provenance(self, identity: Identity) -> None:
        path = self._out / DATASET_NAME
        try:
            stated = read_regular(path, max_bytes=_MAX_DATASET_BYTES)
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
        data = dataset_document(identity, self._starts)
        expected = orjson.loads(data)
        if not self._starts:
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
        if self._starts and not differs and stated != data:
            self._find(FindingKind.PROVENANCE, f"{path} is not written as this tool writes it")

    # --- shards ------------------------------------------------------------------------------

    def _check_shard(self, shard: Shard, identity: Identity) -> None:
        path = sealed_shard_path(self._directory, shard)
        if not shard.is_sealed:
            self._find(
                FindingKind.SHARD_UNSEALED,
                f"the run that fills it has not finished; {self._remedy}",
                shard=shard,
            )
            if not os.path.lexists(path):
                path = open_shard_path(self._directory, shard)
        try:
            descriptor = open_regular(path)
        except OSError as error:
            if error.errno in LIMIT_ERRNOS:
                raise
            lost = counted(shard.num_samples, "sample")
            self._find(
                FindingKind.SHARD_MISSING,
                f"{path}: {error.strerror}; lost: {lost}",
                shard=shard,
            )
            return
        try:
            ShardAuditor(
                self._audit, shard, identity, descriptor, block=self._block, progress=self._progress
            ).run(self._store.checked_shard_rows(shard.number), skip=self._audit.damage.rows)
        finally:
            os.close(descriptor)

    def _check_unknown_files(self) -> None:
        known = {shard.name for shard in self._shards}
        known |= {open_shard_path(self._directory, shard).name for shard in self._shards}
        try:
            names = set(os.listdir(self._directory))
        except FileNotFoundError:
            return
        except OSError as error:
            self._find(FindingKind.SHARD_UNKNOWN, f"{self._directory}: {error.strerror}")
            return
        for name in sorted(names - known):
            self._find(FindingKind.SHARD_UNKNOWN, f"{self._directory / name}")


def _problem_of_prompt(prompt: PromptFacts) -> str | None:
    if not _is_digest(prompt.key):
        return f"key is {shown(prompt.key)}, must be 32 hexadecimal digits"
    if unknown := set(prompt.alterations) - _ALTERATIONS:
        return f"alterations has {shown(min(unknown))}, which is unknown"
    if (prompt.num_trained or 0) > prompt.num_tokens:
        return f"num_trained is {prompt.num_trained} of {prompt.num_tokens} tokens"
    return None


def _is_digest(value: str) -> bool:
    return _DIGEST.fullmatch(value) is not None


def _is_json(value: str) -> bool:
    try:
        as_json(value)
    except ValueError:
        return False
    return True


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

"""Checks every record of a manifest, which is untrusted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from extractor.core.errors import CorruptData, UsageError
from extractor.core.identity import Identity
from extractor.servers.canary import ids_of
from extractor.verify.findings import Contents, FindingKind, Findings
from manifest.decoding import Damage, as_json, shown
from manifest.exceptions import ManifestDamaged
from manifest.records import PromptFacts, Row, Shard, StoredSample
from manifest.states import State
from manifest.store import Store
from prompts.types import Alteration
from server_patch.dump_format import DumpFormatError

Record = TypeVar("Record")

_ALTERATIONS = frozenset(Alteration)
_DIGEST = re.compile("[0-9a-f]{32}")


class ManifestAuditor:
    """Reports each wrong record, and keeps those that are sound."""

    def __init__(self, store: Store, findings: Findings, *, remedy: str) -> None:
        """`remedy`: the advice for unfinished work."""
        self.contents = Contents()
        self.shards: list[Shard] = []  # that can be read
        self._store = store
        self._findings = findings
        self._remedy = remedy
        self._num_sources = 0

    def run(self) -> None:
        """Check everything but the identity."""
        self._store.limit_work()
        is_sound = self.survives(self._check_file)
        for step in (
            self._read_sources,
            self._read_starts,
            self._check_canaries,
            self._read_shards,
            self._read_totals,
            self._check_rows,
        ):
            self.survives(step)
        if is_sound:  # in a damaged file, sums over all rows may never end
            self.survives(self._check_sums)

    def survives(self, step: Callable[[], None]) -> bool:
        """Whether a step completed without a finding about the manifest itself."""
        before = self._findings.counts[FindingKind.MANIFEST_DAMAGED]
        try:
            step()
        except ManifestDamaged as error:
            self._damaged(str(error))
        return self._findings.counts[FindingKind.MANIFEST_DAMAGED] == before

    def identity(self) -> Identity | None:
        """The data set's identity; None if it is damaged, which is reported."""
        records = self._sound(self._store.checked_identity())
        try:
            return Identity.from_document({field["name"]: field["value"] for _, field in records})
        except (UsageError, CorruptData) as error:
            self._damaged(f"identity: {error}")
            return None

    def _sound(self, records: Iterable[Record | Damage]) -> Iterator[tuple[int, Record]]:
        """Each record that can be read, and its place; the others are reported."""
        for number, record in enumerate(records):
            if isinstance(record, Damage):
                self._damaged(str(record))
            else:
                yield number, record

    def _damaged(self, problem: str, *, row: int | None = None) -> None:
        self._findings.find(FindingKind.MANIFEST_DAMAGED, problem, row=row)

    def _check_file(self) -> None:
        for problem in self._store.integrity_problems():
            self._damaged(problem)

    def _read_sources(self) -> None:
        sources = self._store.checked_sources()
        self._num_sources = len(sources)
        for number, source in self._sound(sources):
            self.contents.num_input_rows += source.num_rows
            if source.number != number or not _is_digest(source.digest):
                self._damaged(
                    f"sources, row {source.number}: must be number {number}, and its digest "
                    f"{shown(source.digest)} 32 hexadecimal digits"
                )

    def _read_starts(self) -> None:
        session = 0
        for number, start in self._sound(self._store.checked_server_starts()):
            if start.number != number or start.session not in (session, session + 1):
                self._damaged(
                    f"server_starts, row {start.number}: must be number {number}, and its session "
                    f"{start.session} {session} or the next"
                )
            session = start.session
            self.contents.starts.append(start)

    def _check_canaries(self) -> None:
        numbers = set()
        for number, canary in self._store.checked_canaries():
            numbers.add(number)
            if isinstance(canary, Damage):
                self._damaged(str(canary))
                continue
            try:
                ids_of(canary)
            except DumpFormatError as error:
                self._damaged(f"canaries, row {number}: {error}")
        references = {
            start.number for start in self.contents.starts if start.accepted or not start.number
        }
        for number in sorted(numbers ^ references):
            self._damaged(
                f"canaries, row {number}: there must be one for the first start and for each that "
                "was let differ, and no other"
            )

    def _read_shards(self) -> None:
        records = self._store.checked_shards()
        self.contents.num_shards = len(records)
        self.shards += [shard for _, shard in self._sound(records)]
        for damage in self._store.checked_shard_names():
            self._damaged(str(damage))

    def _read_totals(self) -> None:
        self.contents.totals = self._store.totals()

    def _check_sums(self) -> None:
        for problem in self._store.tally_problems():
            self._damaged(problem)
        self.contents.duplicates = self._store.count_duplicates()

    def _check_rows(self) -> None:
        expected = 0
        place = (0, 0)  # source and line of the row before
        shards = {shard.number for shard in self.shards}
        for row in self._store.checked_rows():
            ordinal = expected if row.ordinal is None else row.ordinal
            if ordinal != expected:
                self._findings.find(
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
                    self.contents.num_unattributed += row.sample.server is None
                if not row.state.is_terminal:
                    self._findings.find(
                        FindingKind.ROW_UNFINISHED,
                        f"line {row.origin.line} is {row.state}; {self._remedy}",
                        row=ordinal,
                    )
            if problem is not None:
                self._findings.damaged_rows.add(ordinal)
                self._damaged(problem, row=ordinal)
        if expected != self.contents.num_input_rows:
            self._findings.find(
                FindingKind.ROWS_UNACCOUNTED,
                f"the input has {self.contents.num_input_rows} rows, the manifest knows the first "
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
        num_starts = len(self.contents.starts)
        if not _is_digest(sample.digest):
            return f"digest is {shown(sample.digest)}, must be 32 hexadecimal digits"
        if sample.server is not None and sample.server >= num_starts:
            return f"server is {sample.server}, there are {num_starts}"
        if sample.shard not in shards:
            return f"shard is {sample.shard}, which is not among the shards"
        return None


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

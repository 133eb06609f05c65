"""Collects and formats the findings of `extractor verify`. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from extractor.core.humanize import amount, counted, table
from extractor.shards.dataset import sessions_document, sessions_table
from extractor.status.report import totals_document, totals_table
from manifest.records import ServerStart, Shard, Totals

#: Maximum findings to print; `--json` has all, up to MAX_FINDINGS of each kind.
SHOWN_FINDINGS = 20
#: Maximum findings of one kind to keep; further ones are only counted.
MAX_FINDINGS = 10_000
_MAX_DETAIL_CHARACTERS = 1_000


class FindingKind(StrEnum):
    """The closed list of problems that a data set can have."""

    MANIFEST_DAMAGED = "manifest_damaged"
    ROWS_UNACCOUNTED = "rows_unaccounted"  # an input row that the manifest does not have
    ROW_UNFINISHED = "row_unfinished"  # neither stored nor failed yet
    SHARD_MISSING = "shard_missing"
    SHARD_UNSEALED = "shard_unsealed"
    SHARD_HEADER = "shard_header"  # does not match the manifest
    SHARD_SIZE = "shard_size"
    SHARD_DIGEST = "shard_digest"  # header or samples differ from those that were sealed
    SHARD_UNKNOWN = "shard_unknown"  # a file that the manifest does not know
    SAMPLE_OVERLAP = "sample_overlap"
    SAMPLE_SIZE = "sample_size"  # its extent does not fit its number of tokens
    SAMPLE_DIGEST = "sample_digest"
    SAMPLE_TOKENS = "sample_tokens"  # ids and mask are not those of the prompt
    SAMPLE_NONFINITE = "sample_nonfinite"
    PROVENANCE = "provenance"  # dataset.json is missing or does not match the manifest
    LIVE_DAMAGED = "live_damaged"  # .live.json is not what a session writes


#: Damage that a repair fixes: of a sample's bytes, and of a shard that holds such a sample or does
#: not match the manifest. The next run, or the user, resolves the other kinds.
_OF_A_SAMPLE = frozenset(
    {
        FindingKind.SAMPLE_SIZE,
        FindingKind.SAMPLE_DIGEST,
        FindingKind.SAMPLE_TOKENS,
        FindingKind.SAMPLE_NONFINITE,
    }
)
_OF_A_SHARD = _OF_A_SAMPLE | {
    FindingKind.SHARD_MISSING,
    FindingKind.SHARD_HEADER,
    FindingKind.SHARD_SIZE,
    FindingKind.SHARD_DIGEST,
    FindingKind.SAMPLE_OVERLAP,
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One problem, and its place."""

    kind: FindingKind
    detail: str
    row: int | None = None  # ordinal
    shard: str | None = None

    def __str__(self) -> str:
        row = "" if self.row is None else f" row {self.row}"
        shard = "" if self.shard is None else f" in {self.shard}"
        return f"{self.kind}{row}{shard}: {self.detail}"


Progress = Callable[[int], None]
"""Called with the number of samples checked since the last call."""


@dataclass(kw_only=True)
class Findings:
    """The problems found so far."""

    all: list[Finding] = field(default_factory=list)  # MAX_FINDINGS of each kind
    counts: Counter[FindingKind] = field(default_factory=Counter)
    # As a repair needs them:
    damaged_rows: set[int] = field(default_factory=set)  # in the manifest
    damaged_samples: set[int] = field(default_factory=set)  # in their shards
    damaged_shards: set[int] = field(default_factory=set)  # with anything wrong in them

    def find(
        self, kind: FindingKind, detail: str, *, row: int | None = None, shard: Shard | None = None
    ) -> None:
        """Add a problem; `row` is an ordinal."""
        self.counts[kind] += 1
        if kind in _OF_A_SAMPLE and row is not None:
            self.damaged_samples.add(row)
        if kind in _OF_A_SHARD and shard is not None:
            self.damaged_shards.add(shard.number)
        if self.counts[kind] <= MAX_FINDINGS:
            name = shard.name if shard else None
            self.all.append(Finding(kind=kind, detail=_printable(detail), row=row, shard=name))

    def by_kind(self) -> dict[FindingKind, int]:
        return dict(sorted(self.counts.items()))


@dataclass(kw_only=True)
class Contents:
    """The records of a manifest that can be read, counted."""

    totals: Totals = field(default_factory=Totals)
    num_input_rows: int = 0
    num_shards: int = 0
    duplicates: int = 0  # stored samples with the same ids and mask as another
    starts: list[ServerStart] = field(default_factory=list)
    num_unattributed: int = 0  # stored samples of an older version, without a server start


@dataclass(kw_only=True)
class Audit:
    """The result of `verify`."""

    is_fast: bool = False
    writer: int | None = None  # pid of the process that was writing when the audit began
    contents: Contents = field(default_factory=Contents)
    findings: Findings = field(default_factory=Findings)
    samples_checked: int = 0
    bytes_checked: int = 0

    @property
    def is_clean(self) -> bool:
        return not self.findings.counts

    @property
    def remedy(self) -> str:
        """The advice for unfinished work."""
        if self.writer is None:
            return "run the same command again"
        return f"process {self.writer} is working on it"

    def to_document(self) -> dict[str, Any]:
        """The stable JSON of `extractor verify --json`."""
        contents, findings = self.contents, self.findings
        return {
            "clean": self.is_clean,
            "fast": self.is_fast,
            "writer": self.writer,
            "input_rows": contents.num_input_rows,
            **totals_document(contents.totals),
            "duplicates": contents.duplicates,
            "shards": contents.num_shards,
            "sessions": sessions_document(contents.starts),
            "samples_without_server": contents.num_unattributed,
            "samples_checked": self.samples_checked,
            "bytes_checked": self.bytes_checked,
            "finding_counts": {kind.value: n for kind, n in findings.by_kind().items()},
            "findings": [asdict(finding) for finding in findings.all],
        }

    def to_text(self) -> str:
        """The output of `extractor verify`: row counts, the checks made, and the first findings."""
        contents, findings = self.contents, self.findings
        unread = contents.num_input_rows - contents.totals.num_rows
        lines = [
            totals_table(contents.totals, num_unread=max(0, unread)),
            table(
                [
                    ("duplicates", f"{contents.duplicates:,}"),
                    ("shards", f"{contents.num_shards:,}"),
                    ("samples checked", f"{self.samples_checked:,}"),
                    ("bytes checked", amount(self.bytes_checked)),
                ]
            ),
        ]
        if contents.starts:
            lines.append(sessions_table(contents.starts))
        if contents.num_unattributed:
            lines.append(
                f"{counted(contents.num_unattributed, 'sample')} stored by an older version, which "
                "did not record the server"
            )
        lines += [f"FINDING  {kind}: {n:,}" for kind, n in findings.by_kind().items()]
        lines += [f"  {finding}" for finding in findings.all[:SHOWN_FINDINGS]]
        num_found = findings.counts.total()
        if (hidden := num_found - SHOWN_FINDINGS) > 0:
            lines.append(f"  … and {hidden:,} more: --json lists them")
        if self.writer is not None:
            lines.append(
                f"process {self.writer} is writing this data set: unfinished work is not "
                "damage; verify again when it has ended"
            )
        lines.append("clean" if self.is_clean else counted(num_found, "finding"))
        return "\n".join(lines)


def _printable(text: str) -> str:
    """A detail that is safe to print, since it may quote a damaged or hostile file."""
    text = text[:_MAX_DETAIL_CHARACTERS]
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)

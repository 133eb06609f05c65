"""`extractor status`: how far a run is, from its manifest alone; also while it is going on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from extractor.config import MANIFEST_NAME, Identity
from extractor.live import Live, read_live
from extractor.report import totals_document
from manifest.records import Row, Source, Totals
from manifest.states import State
from manifest.store import Store

#: Failed rows that are listed; `--all` lists every one.
SHOWN_FAILURES = 20


@dataclass(frozen=True, kw_only=True)
class Status:
    """A snapshot of a run."""

    identity: Identity
    sources: tuple[Source, ...]
    totals: Totals
    num_shards: int
    failed: tuple[Row, ...]  # the first of them, or all
    live: Live | None  # what a session that is going on says of itself

    @property
    def num_rows(self) -> int:
        return sum(source.num_rows for source in self.sources)

    @property
    def num_unread(self) -> int:
        """Rows that no session came to yet."""
        return self.num_rows - self.totals.num_rows

    def path_of(self, row: Row) -> str:
        """The path of the input file that holds a row."""
        number = row.origin.source
        return self.sources[number].path if number < len(self.sources) else f"source {number}"

    def to_document(self) -> dict[str, Any]:
        """The stable JSON of `extractor status --json`."""
        return {
            "model": self.identity.model,
            "boundaries": list(self.identity.boundaries),
            "last_kind": self.identity.last_kind,
            "dtype": self.identity.dtype,
            "input_rows": self.num_rows,
            "unread": self.num_unread,
            **totals_document(self.totals),
            "shards": self.num_shards,
            "live": None if self.live is None else {"pid": self.live.pid, **self.live.session},
            "failed_rows": [
                {
                    "row": row.ordinal,
                    "source": self.path_of(row),
                    "line": row.origin.line,
                    "label": row.origin.label,
                    "reason": row.reason,
                    "detail": row.detail,
                }
                for row in self.failed
            ],
        }


def read_status(out: Path, *, all_failures: bool = False) -> Status:
    """Raises ManifestMissing where there is no run."""
    store = Store.open_read_only(out / MANIFEST_NAME)
    try:
        failed: list[Row] = []
        for row in store.failed_rows():
            if not all_failures and len(failed) == SHOWN_FAILURES:
                break
            failed.append(row)
        return Status(
            identity=Identity.from_document(store.identity()),
            sources=tuple(store.sources()),
            totals=store.totals(),
            num_shards=len(store.shards()),
            failed=tuple(failed),
            live=read_live(out),
        )
    finally:
        store.close()


def failed_table(status: Status) -> str:
    """File, line, reason and detail of the failed rows that the status holds."""
    lines = [
        f"{status.path_of(row)}:{row.origin.line}: {row.reason}: {row.detail}"
        for row in status.failed
    ]
    hidden = status.totals.by_state.get(State.FAILED, 0) - len(lines)
    if hidden:
        lines.append(f"… and {hidden:,} more: extractor status --all")
    return "\n".join(lines)

"""Reads a run's rows, failures and running session for `extractor status`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from extractor.core.locations import MANIFEST_NAME
from extractor.status.report import totals_document
from extractor.status.watcher import Begun, Look, Watcher
from manifest.records import Row
from manifest.states import State
from manifest.store import Store

#: Maximum failed rows to list; `--all` lists every one.
SHOWN_FAILURES = 20


@dataclass(frozen=True, kw_only=True)
class Status:
    """A snapshot of a run."""

    look: Look
    begun: Begun  # with alterations
    num_shards: int
    failed: tuple[Row, ...]  # the first of them, or all

    def path_of(self, row: Row) -> str:
        """The path of the input file that holds a row."""
        sources, number = self.begun.sources, row.origin.source
        return sources[number].path if number < len(sources) else f"source {number}"

    def to_document(self) -> dict[str, Any]:
        """The stable JSON of `extractor status --json`."""
        begun, live = self.begun, self.look.live
        return {
            "model": begun.identity.model.path,
            "boundaries": list(begun.identity.boundaries),
            "last_kind": begun.identity.last_kind,
            "dtype": begun.identity.model.dtype,
            "input_rows": begun.num_rows,
            "unread": begun.num_unread,
            **totals_document(begun.totals),
            "shards": self.num_shards,
            "live": None if live is None else {"pid": live.pid, **live.session},
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
    """Raises ManifestMissing where there is no run, UsageError where none has begun."""
    # First: a run that ends meanwhile may be shown at work, but not the reverse.
    look = Watcher(out).look()
    store = Store.open_read_only(out / MANIFEST_NAME)
    try:
        begun = Begun.read(store, with_alterations=True)
        return Status(
            look=replace(look, begun=begun),
            begun=begun,
            num_shards=len(store.shards()),
            failed=tuple(islice(store.failed_rows(), None if all_failures else SHOWN_FAILURES)),
        )
    finally:
        store.close()


def failed_table(status: Status) -> str:
    """File, line, reason and detail of the failed rows that the status holds."""
    lines = [
        f"{status.path_of(row)}:{row.origin.line}: {row.reason}: {row.detail}"
        for row in status.failed
    ]
    hidden = status.begun.totals.by_state.get(State.FAILED, 0) - len(lines)
    if hidden:
        lines.append(f"… and {hidden:,} more: extractor status --all")
    return "\n".join(lines)

"""The result of a finished run, for people and for programs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from extractor.core.counters import Counters, Stage
from extractor.core.humanize import amount, milliseconds, table
from extractor.dispatch.server import Server
from extractor.status.report import session_document, totals_document, totals_table
from manifest.records import Totals
from manifest.states import ASKED_FOR, State
from manifest.writer_thread import Commits


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The rows of the data set, and the session that finished it."""

    totals: Totals
    counters: Counters
    duplicates: int | None  # among stored samples; None: not counted, as nothing was stored
    servers: tuple[Server, ...]  # the servers; empty where nothing was to be sent
    commits: Commits  # of the manifest, this session

    @property
    def num_failed(self) -> int:
        """Failed rows, except those that the user asked to skip."""
        asked_for = sum(self.totals.by_reason.get(reason, 0) for reason in ASKED_FOR)
        return self.totals.by_state.get(State.FAILED, 0) - asked_for

    def to_document(self, out: Path) -> dict[str, Any]:
        """The stable JSON of `extractor run --json`."""
        return {
            "out": str(out),
            **totals_document(self.totals),
            "duplicates": self.duplicates,
            "session": {
                **session_document(self.counters),
                "peak_shm_bytes": self.counters.now.peak_shm_bytes,
                "servers": [server.to_document() for server in self.servers],
                "commits": self.commits.to_document(),
            },
        }

    def to_text(self, out: Path) -> str:
        """The last lines of `extractor run`."""
        counters = self.counters
        lines = [totals_table(self.totals)]
        if counters.rows.stored:
            lifetime = counters.stages[Stage.RESIDENCY]
            p50, p99 = (milliseconds(lifetime.quantile(share)) for share in (0.5, 0.99))
            seconds = counters.pace.seconds
            session = [
                ("this session", f"{counters.rows.stored:,} samples in {seconds:.1f} s"),
                ("speed", f"{counters.tokens_per_s:,.0f} tok/s"),
                ("peak /dev/shm", amount(counters.now.peak_shm_bytes)),
                ("dump lifetime", f"{p50} p50, {p99} p99"),
                *((f"requests at {server.url}", server.to_text()) for server in self.servers),
                ("sent again", f"{counters.retried:,}"),
                ("duplicates", f"{self.duplicates or 0:,}"),
            ]
            lines.append(table(session))
        if self.num_failed:
            lines.append(f"failed rows, each with its reason: extractor status {out}")
        lines.append(f"data set in {out}; prove it with: extractor verify {out}")
        return "\n".join(lines)

"""Formats the counts of rows and of a session, as text and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extractor.core.counters import Counters
from extractor.core.histogram import Durations
from extractor.core.humanize import amount, table
from manifest.records import Totals
from manifest.states import State


def totals_document(totals: Totals) -> dict[str, Any]:
    """The common part of the JSON of `run`, `verify` and `status`."""
    return {
        "rows": {state.value: totals.by_state.get(state, 0) for state in State},
        "failed": {reason.value: count for reason, count in sorted(totals.by_reason.items())},
        "untrained": totals.untrained,
        "altered": dict(sorted(totals.by_alteration.items())),
        "tokens": totals.stored_tokens,
        "bytes": totals.stored_bytes,
    }


def totals_table(
    totals: Totals, *, num_unread: int = 0, now: Mapping[str, Any] | None = None
) -> str:
    """The rows by state and reason; they add up to the rows of the input.

    `now`: of the `session_document` of a running session, which has rows in flight.
    """
    counts = {state: totals.by_state.get(state, 0) for state in State}
    rows = []
    if counts[State.PLANNED]:
        rows.append(("planned", f"{counts[State.PLANNED]:,}"))
    if now is not None:
        rows.append(("  with a server", f"{now['in_flight']:,}"))
        rows.append(("  waiting for a mover", f"{now['mover_queue']:,}"))
    rows += [(state.value, f"{counts[state]:,}") for state in (State.STORED, State.FAILED)]
    for reason, count in sorted(totals.by_reason.items()):
        rows.append((f"  {reason}", f"{count:,}"))
    if num_unread:
        rows.append(("not read yet", f"{num_unread:,}"))
    rows.append(("rows in all", f"{totals.num_rows + num_unread:,}"))
    rows.append(("tokens stored", f"{totals.stored_tokens:,}"))
    rows.append(("bytes stored", amount(totals.stored_bytes)))
    if totals.untrained:
        rows.append(("of these, without a trained token", f"{totals.untrained:,}"))
    for name, count in sorted(totals.by_alteration.items()):
        rows.append((f"of these, {name}", f"{count:,}"))
    return table(rows)


def session_document(counters: Counters) -> dict[str, Any]:
    """The session in the JSON of `extractor run`, and in `.live.json` meanwhile.

    Counts are of this session, but for `input_rows` and `settled_before`; `now` is of the moment.
    """
    return {
        "input_rows": counters.rows.total,
        "settled_before": counters.rows.settled_before,
        "stored": counters.rows.stored,
        "failed": counters.rows.failed,
        "failed_by_reason": {
            reason.value: count for reason, count in sorted(counters.rows.failed_by_reason.items())
        },
        "sent": counters.sent,
        "retried": counters.retried,
        "tokens": counters.tokens,
        "bytes": counters.stored_bytes,
        "seconds": counters.pace.seconds,
        "tokens_per_s": counters.tokens_per_s,
        "stages": {
            stage.value: durations_document(durations)
            for stage, durations in counters.stages.items()
        },
        "now": {
            "tokens_per_s": counters.pace.tokens_per_s,
            "rows_per_s": counters.pace.rows_per_s,
            "servers": [
                {
                    "url": server.url,
                    "is_up": server.is_up,
                    "in_flight": server.in_flight,
                    "request_limit": server.request_limit,
                    "prompts": server.num_prompts,
                }
                for server in counters.now.servers
            ],
            "in_flight": counters.now.in_flight,
            "request_limit": counters.now.request_limit,
            "shm_bytes": counters.now.shm_bytes,
            "budget_bytes": counters.now.budget_bytes,
            "budget_queue": counters.now.budget_queue,
            "mover_queue": counters.now.mover_queue,
        },
    }


def durations_document(durations: Durations) -> dict[str, float]:
    """Count and milliseconds; p50 and p99 are at most 12 % too high."""
    return {
        "count": durations.count,
        "mean_ms": 1e3 * durations.mean_s,
        "p50_ms": 1e3 * durations.quantile(0.5),
        "p99_ms": 1e3 * durations.quantile(0.99),
        "max_ms": 1e3 * durations.max_s,
    }

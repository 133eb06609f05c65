"""The rows of a run in numbers, for people and for programs. Pure."""

from __future__ import annotations

from typing import Any

from extractor.tables import amount, table
from manifest.records import Totals
from manifest.states import State


def totals_document(totals: Totals) -> dict[str, Any]:
    """The part that the JSON of `run`, `verify` and `status` has in common."""
    return {
        "rows": {state.value: totals.by_state.get(state, 0) for state in State},
        "failed": {reason.value: count for reason, count in sorted(totals.by_reason.items())},
        "untrained": totals.untrained,
        "altered": dict(sorted(totals.by_alteration.items())),
        "tokens": totals.stored_tokens,
        "bytes": totals.stored_bytes,
    }


def totals_table(totals: Totals, *, num_unread: int = 0) -> str:
    """The rows by state and reason; they add up to the rows of the input."""
    rows = [(state.value, f"{totals.by_state.get(state, 0):,}") for state in State]
    rows = [row for row in rows if row[1] != "0" or row[0] in ("stored", "failed")]
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

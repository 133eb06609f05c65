"""What becomes of rows: told to the manifest, counted, and shown."""

from __future__ import annotations

from extractor.core.admission import Refusal
from extractor.core.counters import Counters
from extractor.core.events import Reporter
from extractor.core.failure import Failure
from extractor.core.layout import Layout
from extractor.shards.format import sample_bytes
from manifest.records import Failed, Moved, Planned, Rejected
from manifest.states import ASKED_FOR, Event, Reason
from manifest.writer_thread import StoreOwner
from prompts.types import BadRow, Prompt

#: Failed rows that are named as they happen; `extractor status` lists all.
SHOWN_FAILURES = 20
REJECTIONS_PER_COMMIT = 1000


class Ledger:
    """Keeps the manifest, the counters and a person in step."""

    def __init__(
        self, owner: StoreOwner, counters: Counters, reporter: Reporter, layout: Layout
    ) -> None:
        self._owner = owner
        self._counters = counters
        self._reporter = reporter
        self._layout = layout

    def plan(self, prompt: Prompt, row: Prompt | BadRow, *, source: int) -> None:
        """A prompt is to be sent; `row`: the same before it was cut."""
        self._owner.post(planned_row(prompt, row, source))

    def move(self, prompt: Prompt, event: Event, *, attempts: int) -> None:
        """A prompt is one step further, or back."""
        self._owner.post(Moved(ordinal=prompt.ordinal, event=event, attempts=attempts))

    async def reject(self, row: Prompt | BadRow, refused: Refusal, *, source: int) -> None:
        """A row gives no prompt to send."""
        self._owner.post(
            Rejected(
                ordinal=row.ordinal,
                source=source,
                line=row.origin.line,
                label=row.label,
                part=row.origin.part,
                reason=refused.reason,
                detail=refused.detail,
                key=row.key if isinstance(row, Prompt) else None,
                num_tokens=row.num_tokens if isinstance(row, Prompt) else None,
            )
        )
        self._count_failed(row, refused.reason, refused.detail)
        if self._counters.rows.failed % REJECTIONS_PER_COMMIT == 0:
            # Nothing else holds back the reading of a file of bad rows.
            await self._owner.drain()

    def count_stored(self, prompt: Prompt) -> None:
        """A sample is durable; the manifest has it already."""
        self._counters.rows.stored += 1
        self._counters.tokens += prompt.num_tokens
        self._counters.stored_bytes += sample_bytes(prompt.num_tokens, self._layout)

    def count_retry(self) -> None:
        self._counters.retried += 1

    def give_up(self, prompt: Prompt, failure: Failure, *, attempts: int) -> None:
        """A prompt fails for good."""
        self._owner.post(
            Failed(
                ordinal=prompt.ordinal,
                reason=failure.reason,
                detail=failure.detail,
                attempts=attempts,
            )
        )
        self._count_failed(prompt, failure.reason, failure.detail)

    def _count_failed(self, row: Prompt | BadRow, reason: Reason, detail: str) -> None:
        self._counters.rows.failed_by_reason[reason] += 1
        if reason in ASKED_FOR:
            return
        if self._counters.rows.failed <= SHOWN_FAILURES:
            self._reporter.report(
                f"{row.origin}: {reason}: {detail}",
                event="row_failed",
                level="warning",
                source=row.origin.source,
                line=row.origin.line,
                row=row.ordinal,
                reason=reason,
                detail=detail,
            )
        elif self._counters.rows.failed == SHOWN_FAILURES + 1:
            self._reporter.report("… further failed rows: see `extractor status`")


def planned_row(prompt: Prompt, row: Prompt | BadRow, source: int) -> Planned:
    """What the manifest is told of a prompt; `row`: the same before it was cut."""
    detail = None
    if isinstance(row, Prompt) and row.num_tokens > prompt.num_tokens:
        at_least = "more than " if row.is_beginning else ""
        detail = f"cut from {at_least}{row.num_tokens} tokens"
    return Planned(
        ordinal=prompt.ordinal,
        source=source,
        line=prompt.origin.line,
        label=prompt.label,
        part=prompt.origin.part,
        key=prompt.key,
        num_tokens=prompt.num_tokens,
        num_trained=prompt.num_trained,
        alterations=tuple(alteration.value for alteration in prompt.alterations),
        detail=detail,
    )

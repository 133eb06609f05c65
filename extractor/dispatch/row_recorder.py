"""What becomes of rows: told to the manifest, counted, and shown."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from extractor.core.admission import Refusal
from extractor.core.counters import Counters
from extractor.core.events import Reporter
from extractor.core.failure import Failure
from extractor.shards.mover import DurableSample
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
        self,
        owner: StoreOwner,
        counters: Counters,
        reporter: Reporter,
        *,
        server_of: Callable[[str], int | None],
    ) -> None:
        """`server_of`: boot id -> number of the recorded server start."""
        self._owner = owner
        self._counters = counters
        self._reporter = reporter
        self.server_of = server_of

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
                line=row.line,
                label=row.label,
                part=row.part,
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

    async def store(self, samples: Sequence[DurableSample]) -> None:
        """Commit samples whose bytes are durable, and count them."""
        try:
            await self._owner.commit(
                *(
                    change
                    for sample in samples
                    for change in (
                        Moved(
                            ordinal=sample.prompt.ordinal,
                            event=Event.VERIFY,
                            attempts=sample.attempts,
                        ),
                        sample.stored,
                    )
                )
            )
        except asyncio.CancelledError:
            # The commit goes on, and the session may, when a server returns.
            self._count_stored(samples)
            raise
        self._count_stored(samples)

    def _count_stored(self, samples: Sequence[DurableSample]) -> None:
        self._counters.rows.stored += len(samples)
        self._counters.tokens += sum(sample.prompt.num_tokens for sample in samples)
        self._counters.stored_bytes += sum(sample.stored.size_bytes for sample in samples)

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
                f"{row.source}:{row.line}: {reason}: {detail}",
                event="row_failed",
                level="warning",
                source=row.source,
                line=row.line,
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
        line=prompt.line,
        label=prompt.label,
        part=prompt.part,
        key=prompt.key,
        num_tokens=prompt.num_tokens,
        num_trained=prompt.num_trained,
        alterations=tuple(alteration.value for alteration in prompt.alterations),
        detail=detail,
    )

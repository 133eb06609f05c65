"""Records each row's outcome in the manifest, the counters and the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from extractor.core.admission import Refusal
from extractor.core.counters import Counters
from extractor.core.events import Reporter, ReportLine
from extractor.core.failure import Failure
from extractor.core.foreign_text import shortened
from manifest.records import (
    Failed,
    Lost,
    Planned,
    PromptFacts,
    Rejected,
    Retried,
    SourceRow,
    Stored,
)
from manifest.states import ASKED_FOR, Reason
from manifest.writer_thread import StoreOwner
from prompts.inputs import InputFile
from prompts.types import BadRow, Prompt

#: A detail may hold words of a server or of a row, which have no end of their own.
MAX_DETAIL_CHARS = 2000
#: Failed rows that are named as they happen; `extractor status` lists all.
SHOWN_FAILURES = 20

logger = logging.getLogger(__name__)


class RowRecorder:
    """From a row's plan to its end."""

    def __init__(
        self,
        owner: StoreOwner,
        counters: Counters,
        reporter: Reporter,
        *,
        files: Sequence[InputFile],
        server_of: Callable[[str], int | None],
        rejections_per_commit: int = 1000,
    ) -> None:
        """`server_of`: boot id -> number of the recorded server start."""
        self.counters = counters
        self.server_of = server_of
        self._owner = owner
        self._source_numbers = {file.path: number for number, file in enumerate(files)}
        self._reporter = reporter
        self._rejections_per_commit = rejections_per_commit

    @property
    def report(self) -> ReportLine:
        """Shows a line to a person."""
        return self._reporter.report

    def _source_of(self, row: Prompt | BadRow) -> int:
        """The number of the file that the row is from."""
        return self._source_numbers[row.origin.source]

    def plan(self, prompt: Prompt, row: Prompt | BadRow) -> None:
        """A prompt is to be sent; `row`: the same before it was cut."""
        self._owner.post(planned_row(prompt, row, self._source_of(row)))
        logger.debug(
            "admitted row=%d origin=%s tokens=%d",
            prompt.ordinal, prompt.origin, prompt.num_tokens,
        )  # fmt: skip

    async def reject(self, row: Prompt | BadRow, refused: Refusal) -> None:
        """A row gives no prompt to send."""
        detail = shortened(refused.detail, MAX_DETAIL_CHARS)
        self._owner.post(
            Rejected(
                origin=_origin_of(row, self._source_of(row)),
                prompt=_facts_of(row) if isinstance(row, Prompt) else None,
                reason=refused.reason,
                detail=detail,
            )
        )
        logger.info("refused row=%d reason=%s: %s", row.ordinal, refused.reason, detail)
        self._count_failed(row, refused.reason, detail)
        if self.counters.rows.failed % self._rejections_per_commit == 0:
            # Nothing else holds back the reading of a file of bad rows.
            await self._owner.drain()

    def retry(self, prompt: Prompt, failure: Failure, *, attempts: int) -> None:
        """An attempt failed, and the prompt is sent again."""
        self.counters.retried += 1
        self._owner.post(Retried(ordinal=prompt.ordinal, attempts=attempts))
        logger.info(
            "retry row=%d attempt=%d reason=%s: %s",
            prompt.ordinal,
            attempts,
            failure.reason,
            failure.detail,
        )

    def lose(self, prompt: Prompt, *, attempts: int) -> None:
        """A server died while it had the prompt's request."""
        self._owner.post(Lost(ordinal=prompt.ordinal, attempts=attempts))
        logger.warning("server died row=%d attempt=%d", prompt.ordinal, attempts)

    async def flush(self) -> None:
        """Return once everything recorded so far is durable."""
        await self._owner.drain()

    async def store(self, samples: Sequence[tuple[Prompt, Stored]]) -> None:
        """Commit samples whose bytes are durable, and count them."""
        try:
            await self._owner.commit(*(stored for _, stored in samples))
        except asyncio.CancelledError:
            # The commit goes on, and the session may, when a server returns.
            self._count_stored(samples)
            raise
        self._count_stored(samples)

    def _count_stored(self, samples: Sequence[tuple[Prompt, Stored]]) -> None:
        self.counters.rows.stored += len(samples)
        self.counters.tokens += sum(prompt.num_tokens for prompt, _ in samples)
        self.counters.stored_bytes += sum(stored.sample.size_bytes for _, stored in samples)

    def give_up(self, prompt: Prompt, failure: Failure, *, attempts: int) -> None:
        """A prompt fails for good."""
        detail = shortened(failure.detail, MAX_DETAIL_CHARS)
        self._owner.post(
            Failed(ordinal=prompt.ordinal, reason=failure.reason, detail=detail, attempts=attempts)
        )
        logger.info(
            "given up row=%d attempts=%d reason=%s: %s",
            prompt.ordinal, attempts, failure.reason, detail,
        )  # fmt: skip
        self._count_failed(prompt, failure.reason, detail)

    def _count_failed(self, row: Prompt | BadRow, reason: Reason, detail: str) -> None:
        self.counters.rows.failed_by_reason[reason] += 1
        if reason in ASKED_FOR:
            return
        if self.counters.rows.failed <= SHOWN_FAILURES:
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
        elif self.counters.rows.failed == SHOWN_FAILURES + 1:
            self._reporter.report("… further failed rows: see `extractor status`")


def planned_row(prompt: Prompt, row: Prompt | BadRow, source: int) -> Planned:
    """The manifest's record of a planned prompt; `row`: the same before it was cut."""
    detail = None
    if isinstance(row, Prompt) and row.num_tokens > prompt.num_tokens:
        at_least = "more than " if row.is_beginning else ""
        detail = f"cut from {at_least}{row.num_tokens} tokens"
    return Planned(origin=_origin_of(prompt, source), prompt=_facts_of(prompt), detail=detail)


def _origin_of(row: Prompt | BadRow, source: int) -> SourceRow:
    return SourceRow(
        ordinal=row.ordinal,
        source=source,
        line=row.origin.line,
        label=row.label,
        part=row.origin.part,
    )


def _facts_of(prompt: Prompt) -> PromptFacts:
    return PromptFacts(
        key=prompt.key,
        num_tokens=prompt.num_tokens,
        num_trained=prompt.num_trained,
        alterations=tuple(alteration.value for alteration in prompt.alterations),
    )

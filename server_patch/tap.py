"""From one forward's states to queued dumps. The only code of ours on the forward thread.

Nothing raised here reaches the engine: what goes wrong becomes an error record for the requests
that are concerned, and the server goes on serving.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from server_patch.dump_format import DumpHeader, ErrorRecord
from server_patch.engine import Batch
from server_patch.layout import Layout
from server_patch.ring import Ring
from server_patch.spans import Span, is_ours, plan_spans, split_spans
from server_patch.staging import Stager, States
from server_patch.stats import Stats
from server_patch.writer import Failure, Piece, WriterPool, describe

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What every dump of this writer says of itself."""

    boundaries: tuple[int, ...]
    boot_id: str
    rank: int
    rid_prefix: str


class Tap:
    """Hands our requests' rows to the writers."""

    def __init__(
        self,
        *,
        identity: Identity,
        layout: Layout,
        ring: Ring,
        stager: Stager,
        writers: WriterPool,
        stats: Stats,
    ) -> None:
        self._identity = identity
        self._layout = layout
        self._ring = ring
        self._stager = stager
        self._writers = writers
        self._stats = stats
        self._counter = itertools.count()
        self._failed = False

    def take(self, batch: Batch, states: States) -> None:
        """Queue the dumps of one forward. Waits for a free slot if need be; never raises."""
        begun = time.perf_counter()
        # Requests and their first positions, not yet safely queued.
        missing: list[tuple[str, int]] = [(rid, 0) for rid in self._ours(batch.rids)]
        try:
            spans = plan_spans(
                rids=batch.rids,
                extend_lens=batch.extend_lens,
                prefix_lens=batch.prefix_lens,
                rid_prefix=self._identity.rid_prefix,
                total_rows=states.last.shape[0],
                live_rows=batch.live_rows,
                prompt_lens=batch.prompt_lens,
            )
            missing = [(span.rid, span.start) for span in spans]
            states.check(self._layout)
            groups = split_spans(spans, max_rows=self._ring.plan.slot_rows)
            waited = 0.0
            for number, group in enumerate(groups):
                missing = [(s.rid, s.start) for rest in groups[number:] for s in rest]
                waited += self._queue_group(group, states)
            missing = []
            self._stats.add(
                forwards=1,
                foreign_requests=len(batch.rids) - len(self._ours(batch.rids)),
                ring_wait_seconds=waited,
                tap_seconds=time.perf_counter() - begun,
            )
        except Exception as error:
            reason = describe(error, doing="taking the states")
            # Whatever is wrong may be wrong in every forward: one traceback is enough.
            logger.error("hidden states: %s", reason, exc_info=not self._failed)
            self._failed = True
            self.record_failures(missing, reason)

    def refuse(self, rids: Sequence[str], reason: str) -> None:
        """Queue an error record for each of our requests among `rids`. Never raises."""
        self.record_failures([(rid, 0) for rid in self._ours(rids)], reason)

    def record_failures(self, pieces: Sequence[tuple[str, int]], reason: str) -> None:
        """Queue an error record for each (rid, start)."""
        for rid, start in pieces:
            self._stats.add(errors=1)
            record = ErrorRecord(rid=rid, start=start, reason=reason)
            self._writers.submit(Failure(record=record, counter=next(self._counter)))

    def _queue_group(self, group: Sequence[Span], states: States) -> float:
        """Stage the rows of `group` in one slot and queue its pieces; seconds waited."""
        begin, end = group[0].begin, group[-1].end
        slot, waited = self._ring.acquire()
        try:
            headers = [self._header(span) for span in group]
            self._stager.stage(states, self._layout, slot, begin=begin, end=end)
        except BaseException:
            self._ring.hold(slot, 1)
            self._ring.release(slot)
            raise
        self._ring.hold(slot, len(group))
        for span, header in zip(group, headers, strict=True):
            self._writers.submit(
                Piece(header=header, slot=slot, slot_rows=end - begin, begin=span.begin - begin)
            )
        return waited

    def _header(self, span: Span) -> DumpHeader:
        return DumpHeader(
            rid=span.rid,
            start=span.start,
            rows=span.rows,
            boundaries=self._identity.boundaries,
            hidden_size=self._layout.hidden_size,
            dtype=self._layout.dtype,
            last_kind=self._layout.last_kind,
            boot_id=self._identity.boot_id,
            rank=self._identity.rank,
            counter=next(self._counter),
        )

    def _ours(self, rids: Sequence[str]) -> list[str]:
        return [rid for rid in rids if is_ours(rid, self._identity.rid_prefix)]

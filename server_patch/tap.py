"""Queues the dumps of one forward's states. This is the plugin's only work on the forward thread.

Nothing raised here reaches the engine: an error becomes an error record of each request that it
concerns, and the server continues to serve.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from typing import Final

from server_patch import request_log
from server_patch.ring import Ring, RingSlot
from server_patch.sglang_api import PrefillBatch
from server_patch.slot_layout import SlotLayout
from server_patch.spans import Span, is_ours, plan_spans, split_spans
from server_patch.staging import Stager, States
from server_patch.stats import Stats
from server_patch.weights import Weights
from server_patch.writer_pool import WriterPool
from server_patch.writer_process import describe
from server_patch.writer_protocol import FailedPiece, Report, SlotPiece

logger = logging.getLogger(__name__)

#: A slot can also come free without a report, when its copy fails.
_LOOK_S: Final = 0.05


class Tap:
    """Passes the rows of our requests to the writers."""

    def __init__(
        self,
        *,
        rid_prefix: str,
        layout: SlotLayout,
        ring: Ring,
        stager: Stager,
        writers: WriterPool,
        stats: Stats,
        weights: Weights,
    ) -> None:
        self._rid_prefix = rid_prefix
        self._layout = layout
        self._ring = ring
        self._stager = stager
        self._writers = writers
        self._stats = stats
        self._weights = weights
        self._counter = itertools.count()
        self._num_forwards = 0
        self._failed = False

    def take(self, batch: PrefillBatch, states: States) -> None:
        """Queue the dumps of one forward. Waits for a free slot if need be; never raises."""
        begun = time.perf_counter()
        # Requests and their first positions, not yet safely queued.
        missing: list[tuple[str, int]] = [(rid, 0) for rid in self._ours(batch.rids)]
        num_ours = len(missing)
        self._num_forwards += 1
        try:
            spans = plan_spans(
                rids=batch.rids,
                extend_lens=batch.extend_lens,
                prefix_lens=batch.prefix_lens,
                rid_prefix=self._rid_prefix,
                total_rows=states.last.shape[0],
                live_rows=batch.live_rows,
                prompt_lens=batch.prompt_lens,
            )
            missing = [(span.rid, span.start) for span in spans]
            if request_log.debug_enabled():
                for span in spans:
                    request_log.captured(
                        span.rid, forward=self._num_forwards, start=span.start, rows=span.rows
                    )
            states.check(self._layout)
            groups = split_spans(spans, max_rows=self._ring.plan.slot_rows)
            waited = 0.0
            for number, group in enumerate(groups):
                missing = [(s.rid, s.start) for rest in groups[number:] for s in rest]
                waited += self._queue_group(group, states)
            missing = []
            self._stats.add_forward(
                foreign_requests=len(batch.rids) - num_ours,
                ring_wait_seconds=waited,
                tap_seconds=time.perf_counter() - begun,
                ring_bytes=self._ring.peak_bytes,
            )
        except Exception as error:
            reason = describe(error, doing="taking the states")
            # The same error may occur in every forward: one traceback is enough.
            logger.error("hidden states: %s", reason, exc_info=not self._failed)
            self._failed = True
            self.record_failures(missing, reason)

    def refuse(self, rids: Sequence[str], reason: str) -> None:
        """Queue an error record for each of our requests among `rids`. Never raises."""
        self.record_failures([(rid, 0) for rid in self._ours(rids)], reason)

    def record_failures(self, pieces: Sequence[tuple[str, int]], reason: str) -> None:
        """Queue an error record for each (rid, start)."""
        if not pieces:
            return
        self._stats.add_report(Report(errors=len(pieces)))
        self._writers.submit_failures(
            [
                FailedPiece(rid=rid, start=start, reason=reason, counter=next(self._counter))
                for rid, start in pieces
            ]
        )

    def _queue_group(self, group: Sequence[Span], states: States) -> float:
        """Stage the rows of `group` in one slot and queue its pieces; seconds waited."""
        begin, end = group[0].begin, group[-1].end
        slot, waited = self._take_slot()
        try:
            self._stager.stage(states, self._layout, slot, begin=begin, end=end)
        except BaseException:
            self._ring.release(slot)
            raise
        pieces = [
            SlotPiece(
                rid=span.rid,
                start=span.start,
                begin=span.begin - begin,
                rows=span.rows,
                counter=next(self._counter),
            )
            for span in group
        ]
        self._writers.submit(
            slot, slot_rows=end - begin, pieces=pieces, weights=self._weights.info.id
        )
        return waited

    def _take_slot(self) -> tuple[RingSlot, float]:
        """A free slot and the seconds waited for it. Blocks as long as it takes."""
        slot = self._ring.take()
        if slot is not None:
            return slot, 0.0
        begun = time.perf_counter()
        while slot is None:
            self._writers.take_reports(timeout_s=_LOOK_S)
            slot = self._ring.take()
        return slot, time.perf_counter() - begun

    def _ours(self, rids: Sequence[str]) -> list[str]:
        return [rid for rid in rids if is_ours(rid, self._rid_prefix)]

"""Counters of one writing rank, shown in the file `<rank dir>/STATS.json`."""

from __future__ import annotations

import json
import operator
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Final

from server_patch.dump_dir import RankDir
from server_patch.writer_protocol import Report

STATS_NAME: Final = "STATS.json"
_INTERVAL_S: Final = 1.0


@dataclass(kw_only=True)
class ForwardCounters:
    """Totals over all forwards since the plugin was armed."""

    forwards: int = 0  # forwards that held at least one of our requests
    foreign_requests: int = 0  # prefill rows of other people's requests, counted per forward
    tap_seconds: float = 0.0  # forward thread's time in the tap, waiting included
    ring_wait_seconds: float = 0.0  # of that: waiting for a free slot
    ring_peak_bytes: int = 0  # most staging memory in use at a time


class Stats:
    """Counters that several threads add to: `ForwardCounters` and the sum of all `Report`."""

    def __init__(self, rank_dir: RankDir, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rank_dir = rank_dir
        self._clock = clock
        self._lock = threading.Lock()
        self._forwards = ForwardCounters()
        self._reports = Report()
        self._has_changed = False  # since the file was written
        self._shown_at = -_INTERVAL_S

    def add_forward(
        self,
        *,
        foreign_requests: int,
        tap_seconds: float,
        ring_wait_seconds: float,
        ring_bytes: int,
    ) -> None:
        """Count one forward. ring_bytes: the most staging memory that was in use so far."""
        with self._lock:
            total = self._forwards
            total.forwards += 1
            total.foreign_requests += foreign_requests
            total.tap_seconds += tap_seconds
            total.ring_wait_seconds += ring_wait_seconds
            total.ring_peak_bytes = max(total.ring_peak_bytes, ring_bytes)
            self._has_changed = True

    def add_report(self, report: Report) -> None:
        """Add the report of a writer, or one of the scheduler in place of a writer."""
        with self._lock:
            self._reports = Report(*map(operator.add, self._reports, report))
            self._has_changed = True

    def snapshot(self) -> dict[str, float]:
        """Every counter by name, all of one moment."""
        with self._lock:
            return {**asdict(self._forwards), **self._reports._asdict()}

    def refresh_file(self) -> None:
        """Rewrite STATS.json at most once a second, and only after a change.

        A file that cannot be written is skipped.
        """
        now = self._clock()
        if not self._has_changed or now - self._shown_at < _INTERVAL_S:
            return
        self._has_changed, self._shown_at = False, now
        data = json.dumps(self.snapshot(), indent=1).encode()
        with suppress(OSError):  # a view for people; the dumps' own failures are recorded
            self._rank_dir.write(STATS_NAME, [data])

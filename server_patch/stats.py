"""Counters of one writing rank, and the file that shows them: `<rank dir>/STATS.json`."""

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
from server_patch.durable_files import replace
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

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forwards = ForwardCounters()
        self._reports = Report()
        self._version = 0

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
            self._version += 1

    def add_report(self, report: Report) -> None:
        """Add the report of a writer, or one of the scheduler in place of a writer."""
        with self._lock:
            self._reports = Report(*map(operator.add, self._reports, report))
            self._version += 1

    @property
    def version(self) -> int:
        """A number that changes with every addition."""
        return self._version

    def snapshot(self) -> dict[str, float]:
        """Every counter by name, all of one moment."""
        with self._lock:
            return {**asdict(self._forwards), **self._reports._asdict()}


class StatsFile:
    """STATS.json of a rank, rewritten at most once a second and only after a change."""

    def __init__(
        self, stats: Stats, rank_dir: RankDir, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stats = stats
        self._rank_dir = rank_dir
        self._clock = clock
        self._shown_version = 0
        self._shown_at = -_INTERVAL_S

    def refresh(self) -> None:
        """Rewrite the file if it is due. A file that cannot be written is skipped."""
        now = self._clock()
        version = self._stats.version
        if version == self._shown_version or now - self._shown_at < _INTERVAL_S:
            return
        self._shown_version, self._shown_at = version, now
        data = json.dumps(self._stats.snapshot(), indent=1).encode()
        with suppress(OSError):  # a view for people; the dumps' own failures are recorded
            replace(self._rank_dir.directory, STATS_NAME, data, mode=self._rank_dir.file_mode)

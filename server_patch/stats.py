"""Counters of one writer process, and the file that shows them: `<rank dir>/STATS.json`."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, dataclass
from typing import Final

STATS_NAME: Final = "STATS.json"


@dataclass(kw_only=True)
class Counters:
    """All totals since the plugin was armed."""

    forwards: int = 0  # forwards that held at least one of our requests
    pieces: int = 0  # dumps written whole
    dump_bytes: int = 0  # their size on disk
    rows: int = 0  # tokens in them
    foreign_requests: int = 0  # prefill rows of other people's requests, counted per forward
    errors: int = 0  # error records asked for
    errors_lost: int = 0  # error records that could not be written either
    tap_seconds: float = 0.0  # forward thread's time in the tap, waiting included
    ring_wait_seconds: float = 0.0  # of that: waiting for a free slot
    ring_peak_bytes: int = 0  # most staging memory in use at a time
    write_seconds: float = 0.0  # writer processes' time in file calls, summed over them


class Stats:
    """`Counters` that several threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters = Counters()
        self._version = 0

    def add(self, **amounts: float) -> None:
        """Add to the named counters at once."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self._counters, name, getattr(self._counters, name) + amount)
            self._version += 1

    def reach(self, **values: float) -> None:
        """Raise the named counters to `values` where they are below."""
        with self._lock:
            for name, value in values.items():
                setattr(self._counters, name, max(getattr(self._counters, name), value))
            self._version += 1

    @property
    def version(self) -> int:
        """Changes with every `add` and `reach`."""
        return self._version

    def snapshot(self) -> Counters:
        with self._lock:
            return Counters(**asdict(self._counters))

    def encode(self) -> bytes:
        return json.dumps(asdict(self.snapshot()), indent=1).encode()

"""The run in numbers: what is counted, how fast it goes, and how long each stage takes. Pure.

There is one `Counters` to a session. The progress bar, the report, `.live.json` (which
`extractor status --watch` reads) and the metrics all show it; nothing is counted twice. Memory does
not grow with what is counted.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from typing import Final

from manifest.states import Reason


class Stage(StrEnum):
    """What a prompt passes through, and what is timed of it."""

    REQUEST = "request"  # from sending a prompt to its answer; failed requests are left out
    ARRIVAL = "arrival"  # from the answer to the last piece of the dump
    MOVER_WAIT = "mover_wait"  # from there to the beginning of the sample's copy
    COPY = "copy"  # one sample: read, hashed, checked, written
    SYNC = "sync"  # fdatasync of a group of samples
    COMMIT = "commit"  # of that group, from asking the manifest to its durable commit
    RESIDENCY = "residency"  # a dump's time under the dump root, from its publishing to its removal


# Renard's series R20: each is 12 % more than the one before, and 1, 2 and 5 are among them.
_R20 = (
    1.0, 1.12, 1.25, 1.4, 1.6, 1.8, 2.0, 2.24, 2.5, 2.8,
    3.15, 3.55, 4.0, 4.5, 5.0, 5.6, 6.3, 7.1, 8.0, 9.0,
)  # fmt: skip
_DECADES: Final = range(-5, 3)  # 10 us to 1,000 s
#: Upper bounds of the buckets, in seconds; what is longer goes into one more.
BOUNDS_S: Final = (
    *(float(f"{step}e{decade}") for decade in _DECADES for step in _R20),
    1000.0,
)
#: The few of these that a histogram shows to others: 1, 2, 5 of each decade.
SHOWN_BOUNDS_S: Final = tuple(
    bound for bound in BOUNDS_S if f"{bound:e}".startswith(("1.000", "2.000", "5.000"))
)


class Durations:
    """A histogram of durations in seconds. Threads may share it.

    >>> durations = Durations()
    >>> for milliseconds in range(1, 101):
    ...     durations.add(milliseconds / 1000)
    >>> durations.count, durations.quantile(0.5), durations.quantile(0.99), durations.max_s
    (100, 0.05, 0.1, 0.1)
    """

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        # `counts[i] += 1` is not one step for the interpreter: movers would lose each other's.
        self._lock = threading.Lock()
        self.total_s = 0.0
        self.max_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one; a negative one, of a clock that was set back, as 0."""
        seconds = max(0.0, seconds)
        bucket = bisect_left(BOUNDS_S, seconds)
        with self._lock:
            self._counts[bucket] += 1
            self.total_s += seconds
            self.max_s = max(self.max_s, seconds)

    @property
    def count(self) -> int:
        return sum(self._counts)

    @property
    def mean_s(self) -> float:
        """0.0 where nothing was counted."""
        return self.total_s / max(1, self.count)

    def quantile(self, share: float) -> float:
        """Seconds that `share` of the durations do not exceed: the true value or up to 12 % more
        (or up to 10 us). 0.0 where nothing was counted."""
        for bound, so_far in zip((*BOUNDS_S, self.max_s), accumulate(self._counts), strict=True):
            if so_far and so_far >= share * self.count:
                return min(bound, self.max_s)
        return 0.0

    def buckets(self) -> Iterator[tuple[float, int]]:
        """For each of `SHOWN_BOUNDS_S`, and for infinity: how many do not exceed it."""
        with self._lock:
            counts = list(self._counts)
        so_far = dict(zip((*BOUNDS_S, float("inf")), accumulate(counts), strict=True))
        for bound in (*SHOWN_BOUNDS_S, float("inf")):
            yield bound, so_far[bound]


Stages = Mapping[Stage, Durations]


def new_stages() -> Stages:
    """Empty histograms, one for each stage."""
    return {stage: Durations() for stage in Stage}


class Pace:
    """Speed of late: over the last `window_s` seconds, from totals noted now and then.

    >>> pace = Pace(window_s=10.0)
    >>> for second in range(20):
    ...     pace.note(float(second), tokens=100 * max(0, second - 10), rows=second)
    >>> pace.tokens_per_s, pace.rows_per_s
    (90.0, 1.0)
    """

    def __init__(self, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._noted: deque[tuple[float, int, int]] = deque()

    def note(self, now: float, *, tokens: int, rows: int) -> None:
        """Totals at this moment, of a clock that only goes forward."""
        self._noted.append((now, tokens, rows))
        while now - self._noted[0][0] > self._window_s:
            self._noted.popleft()

    @property
    def tokens_per_s(self) -> float:
        return self._rate(1)

    @property
    def rows_per_s(self) -> float:
        return self._rate(2)

    def _rate(self, which: int) -> float:
        if len(self._noted) < 2:
            return 0.0
        first, last = self._noted[0], self._noted[-1]
        return (last[which] - first[which]) / max(last[0] - first[0], 1e-9)


@dataclass(frozen=True, kw_only=True)
class ServerNow:
    """One server of the run at one moment."""

    url: str
    is_up: bool  # prompts are sent to it
    in_flight: int  # requests
    request_limit: int  # requests that may be; 0 while it is away
    num_prompts: int  # it answered in this session


@dataclass(kw_only=True)
class Counters:
    """The session in numbers, as they change. Owned by the run; whoever shows them only reads."""

    num_rows: int = 0  # of all input files
    settled_before: int = 0  # rows that earlier sessions settled
    stored: int = 0  # samples, this session
    failed_by_reason: Counter[Reason] = field(default_factory=Counter)  # rows, this session
    tokens: int = 0  # of stored samples, this session
    stored_bytes: int = 0  # this session
    sent: int = 0  # requests, this session
    retried: int = 0
    stages: Stages = field(default_factory=new_stages)
    pace: Pace = field(default_factory=Pace)
    started: float = field(default_factory=time.monotonic)

    # Of this moment, as of the last `observe`.
    servers: tuple[ServerNow, ...] = ()
    shm_bytes: int = 0  # held of the budget: by dumps, and for prompts yet to be sent
    peak_shm_bytes: int = 0  # the most of them at a time, this session
    budget_bytes: int = 0  # the budget
    budget_queue: int = 0  # prompts that wait for room in it
    mover_queue: int = 0  # samples that wait for a mover

    @property
    def in_flight(self) -> int:
        """Requests with the servers, all together."""
        return sum(server.in_flight for server in self.servers)

    @property
    def request_limit(self) -> int:
        """Requests that may be with the servers, all together."""
        return sum(server.request_limit for server in self.servers)

    @property
    def failed(self) -> int:
        """Rows, this session."""
        return self.failed_by_reason.total()

    @property
    def settled(self) -> int:
        return self.settled_before + self.stored + self.failed

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self.started, 1e-9)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def bytes_per_s(self) -> float:
        return self.stored_bytes / self.seconds

    def observe(
        self,
        *,
        servers: tuple[ServerNow, ...],
        shm_bytes: int,
        peak_shm_bytes: int,
        budget_bytes: int,
        budget_queue: int,
        mover_queue: int,
    ) -> None:
        """Note how things stand at this moment, and how fast they go of late. `peak_shm_bytes`:
        since the last start with servers."""
        self.peak_shm_bytes = max(self.peak_shm_bytes, peak_shm_bytes)
        self.servers = servers
        self.shm_bytes, self.budget_bytes = shm_bytes, budget_bytes
        self.budget_queue, self.mover_queue = budget_queue, mover_queue
        self.pace.note(time.monotonic(), tokens=self.tokens, rows=self.settled)

"""The run in numbers: what is counted, how fast it goes, and how long each stage takes. Pure.

There is one `Counters` to a session. The progress bar, the report, `.live.json` (which
`extractor status --watch` reads) and the metrics all show it; nothing is counted twice. Memory does
not grow with what is counted.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from extractor.core.histogram import Durations
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

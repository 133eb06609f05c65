"""Counts a session's rows, bytes and requests, its speed, and the duration of each stage. Pure.

Everything that shows a session reads its one `Counters`. Its memory is bounded.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from extractor.core.histogram import Durations
from manifest.states import Reason


class Stage(StrEnum):
    """A part of a prompt's way from sending to storing, whose duration is measured."""

    REQUEST = "request"  # from sending a prompt to its answer; failed requests are left out
    ARRIVAL = "arrival"  # from the answer to the last piece of the dump
    MOVER_WAIT = "mover_wait"  # from there to the beginning of the sample's copy
    COPY = "copy"  # one sample: read, hashed, checked, written
    SYNC = "sync"  # fdatasync of a group of samples
    COMMIT = "commit"  # of that group, from asking the manifest to its durable commit
    RESIDENCY = "residency"  # a dump's time under the dump root, from its publishing to its removal


Stages = Mapping[Stage, Durations]


class Pace:
    """The session's age, and its recent speed: over the last `window_s` seconds, from totals that
    are noted from time to time.

    >>> pace = Pace(window_s=10.0)
    >>> for second in range(20):
    ...     pace.note(float(second), tokens=100 * max(0, second - 10), rows=second)
    >>> pace.tokens_per_s, pace.rows_per_s
    (90.0, 1.0)
    """

    def __init__(self, window_s: float = 10.0) -> None:
        self.started = time.monotonic()
        self._window_s = window_s
        self._noted: deque[tuple[float, int, int]] = deque()

    def restart(self) -> None:
        """Count the session's age from now on."""
        self.started = time.monotonic()

    def note(self, now: float, *, tokens: int, rows: int) -> None:
        """Add the totals at this moment of a monotonic clock."""
        self._noted.append((now, tokens, rows))
        while now - self._noted[0][0] > self._window_s:
            self._noted.popleft()

    @property
    def seconds(self) -> float:
        """Since the session started."""
        return max(time.monotonic() - self.started, 1e-9)

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
    request_limit: int  # of them; 0 while it is away
    num_prompts: int  # answered in this session


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The servers, the byte budget of dumps and the queues at one moment."""

    servers: tuple[ServerNow, ...] = ()
    budget_bytes: int = 0
    shm_bytes: int = 0  # of the budget: taken by dumps, and reserved for prompts to be sent
    peak_shm_bytes: int = 0  # the maximum of that, this session
    budget_queue: int = 0  # prompts that wait for the budget
    mover_queue: int = 0  # samples that wait for a mover

    @property
    def in_flight(self) -> int:
        """Requests in flight with all servers."""
        return sum(server.in_flight for server in self.servers)

    @property
    def request_limit(self) -> int:
        """Maximum requests in flight with all servers."""
        return sum(server.request_limit for server in self.servers)


@dataclass(kw_only=True)
class InputRows:
    """The rows of all input files, by outcome."""

    total: int = 0
    settled_before: int = 0  # in earlier sessions
    stored: int = 0  # this session
    failed_by_reason: Counter[Reason] = field(default_factory=Counter)  # this session

    @property
    def failed(self) -> int:
        """This session."""
        return self.failed_by_reason.total()

    @property
    def settled(self) -> int:
        """Over all sessions."""
        return self.settled_before + self.stored + self.failed

    @property
    def left(self) -> int:
        return self.total - self.settled


@dataclass(kw_only=True)
class Counters:
    """The session in numbers, as they change. Owned by the run; reporters only read it."""

    rows: InputRows = field(default_factory=InputRows)
    tokens: int = 0  # of stored samples
    stored_bytes: int = 0
    sent: int = 0  # requests
    retried: int = 0
    stages: Stages = field(default_factory=lambda: {stage: Durations() for stage in Stage})
    pace: Pace = field(default_factory=Pace)
    now: Moment = Moment()  # as of the last `observe`

    @property
    def tokens_per_s(self) -> float:
        """The mean since the session started."""
        return self.tokens / self.pace.seconds

    @property
    def bytes_per_s(self) -> float:
        """The mean since the session started."""
        return self.stored_bytes / self.pace.seconds

    def observe(self, now: Moment) -> None:
        """Set `now` and update the pace. The peak is that of all moments."""
        peak = max(self.now.peak_shm_bytes, now.peak_shm_bytes)
        self.now = replace(now, peak_shm_bytes=peak)
        self.pace.note(time.monotonic(), tokens=self.tokens, rows=self.rows.settled)

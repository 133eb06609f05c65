"""What a run shows while it is going on. Writes to stderr only."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Never, Protocol, TextIO

from tqdm import tqdm

LINE_INTERVAL_S = 30.0


@dataclass(kw_only=True)
class Counters:
    """The run in numbers, as they change. Owned by the run; reporters only read."""

    num_rows: int = 0  # of all input files
    settled_before: int = 0  # rows that earlier sessions settled
    stored: int = 0  # samples, this session
    failed: int = 0  # rows, this session
    tokens: int = 0  # of stored samples, this session
    stored_bytes: int = 0  # this session
    sent: int = 0  # requests, this session
    retried: int = 0
    in_flight: int = 0  # requests with the servers now
    limit: int = 0  # requests that they may have now
    shm_bytes: int = 0  # held of the budget now
    started: float = field(default_factory=time.monotonic)

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
    def gigabytes_per_s(self) -> float:
        return self.stored_bytes / self.seconds / 1e9


class Reporter(Protocol):
    """Shows a run's progress. `update` is called often and must be cheap."""

    def update(self, counters: Counters) -> None: ...

    def note(self, message: str) -> None:
        """One line for a person, beside the progress."""

    def close(self) -> None: ...


class BarReporter:
    """A tqdm bar, for terminals."""

    def __init__(self, stream: TextIO = sys.stderr) -> None:
        self._stream = stream
        self._bar: tqdm[Never] | None = None

    def update(self, counters: Counters) -> None:
        if self._bar is None:
            self._bar = tqdm(
                total=counters.num_rows,
                initial=counters.settled_before,
                unit=" rows",
                file=self._stream,
                dynamic_ncols=True,
            )
        self._bar.n = counters.settled
        self._bar.set_postfix_str(_figures(counters), refresh=False)
        self._bar.refresh()

    def note(self, message: str) -> None:
        tqdm.write(message, file=self._stream)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class LineReporter:
    """One line each 30 s, for logs."""

    def __init__(
        self, stream: TextIO = sys.stderr, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._next = clock() + LINE_INTERVAL_S

    def update(self, counters: Counters) -> None:
        if self._clock() < self._next:
            return
        self._next = self._clock() + LINE_INTERVAL_S
        self.note(f"{counters.settled}/{counters.num_rows} rows, {_figures(counters)}")

    def note(self, message: str) -> None:
        print(message, file=self._stream, flush=True)

    def close(self) -> None:
        pass


def reporter_for(stream: TextIO = sys.stderr) -> Reporter:
    return BarReporter(stream) if stream.isatty() else LineReporter(stream)


def _figures(counters: Counters) -> str:
    return (
        f"{counters.tokens_per_s:,.0f} tok/s, {counters.gigabytes_per_s:.3f} GB/s, "
        f"shm {counters.shm_bytes / 1e6:,.0f} MB, {counters.in_flight}/{counters.limit} in flight, "
        f"{counters.failed} failed"
    )

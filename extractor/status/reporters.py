"""Show a running session: a bar for a terminal, lines for a log. Writes to stderr only."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Never, TextIO

from tqdm import tqdm

from extractor.core.counters import Counters
from extractor.core.events import Reporter
from extractor.core.humanize import amount, rate
from extractor.core.log_line import log_line
from extractor.core.printable import printable
from extractor.core.timings import DEFAULT_TIMINGS
from extractor.status.report import session_document

#: Minimum columns of the bar; figures are dropped to make room for it.
MIN_BAR = 8
_BEFORE_BAR, _AFTER_BAR = "{percentage:3.0f}%|", "| {n_fmt}/{total_fmt} [ETA {remaining}{postfix}]"


class BarReporter:
    """A tqdm bar, for terminals."""

    def __init__(self, stream: TextIO = sys.stderr) -> None:
        self._stream = stream
        self._bar: tqdm[Never] | None = None

    def update(self, counters: Counters) -> None:
        if self._bar is None:
            self._bar = tqdm(
                total=counters.rows.total,
                initial=counters.rows.settled,  # tqdm takes what is beyond it for done since now
                file=self._stream,
                dynamic_ncols=True,
                bar_format=f"{_BEFORE_BAR}{{bar}}{_AFTER_BAR}",
            )
        self._bar.n = counters.rows.settled
        self._bar.set_postfix_str(_that_fit(self._bar, _figures(counters)), refresh=False)
        self._bar.refresh()

    def report(self, message: str, **_: object) -> None:
        tqdm.write(printable(message), file=self._stream)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class LineReporter:
    """A line every `interval_s`, for logs that people read."""

    def __init__(
        self,
        stream: TextIO = sys.stderr,
        *,
        interval_s: float = DEFAULT_TIMINGS.status.line_interval_s,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._interval_s = interval_s
        self._clock = clock
        self._next = clock() + interval_s

    def update(self, counters: Counters) -> None:
        if self._clock() < self._next:
            return
        self._next = self._clock() + self._interval_s
        settled, total = counters.rows.settled, counters.rows.total
        self.report(
            f"{settled:,}/{total:,} rows, {', '.join(_figures(counters))}",
            event="progress",
            session=session_document(counters),
        )

    def report(self, message: str, **_: object) -> None:
        print(printable(message), file=self._stream, flush=True)

    def close(self) -> None:
        pass


class JsonReporter(LineReporter):
    """The same lines as JSON objects, one a line, for logs that programs read.

    Every object has `time` (UTC, ISO 8601), `level` (info, warning or error), `event` and
    `message`; docs/observability.md lists the other fields of each event.
    """

    def report(self, message: str, **fields: Any) -> None:
        self._stream.write(f"{log_line(message, **fields)}\n")  # at once: other threads log there
        self._stream.flush()


class Together:
    """Several reporters as one. A closed terminal, or a log on a full disk, does not end a run."""

    def __init__(self, *reporters: Reporter) -> None:
        self._reporters = reporters

    def update(self, counters: Counters) -> None:
        for reporter in self._reporters:
            with suppress(OSError):
                reporter.update(counters)

    def report(self, message: str, **fields: Any) -> None:
        for reporter in self._reporters:
            with suppress(OSError):
                reporter.report(message, **fields)

    def close(self) -> None:
        for reporter in self._reporters:
            with suppress(OSError):
                reporter.close()


def reporter_for(stream: TextIO = sys.stderr, *, as_json: bool = False) -> Reporter:
    """The reporter for a terminal, a log that people read, or one that programs read."""
    if as_json:
        return JsonReporter(stream)
    return BarReporter(stream) if stream.isatty() else LineReporter(stream)


def _that_fit(bar: tqdm[Never], figures: Sequence[str]) -> str:
    """The longest prefix of the figures that leaves room for a readable bar."""
    parts = bar.format_dict
    width = parts["ncols"]
    parts |= {"bar_format": f"{_BEFORE_BAR}{_AFTER_BAR}", "ncols": None}
    for number in range(len(figures), 1, -1):
        postfix = ", ".join(figures[:number])
        without_bar = tqdm.format_meter(**{**parts, "postfix": postfix})
        if width is None or len(without_bar) + MIN_BAR <= width:
            return postfix
    return figures[0]


def _figures(counters: Counters) -> tuple[str, ...]:
    """The most important first: the last are dropped where there is little room."""
    return (
        f"{counters.rows.failed:,} failed",
        f"{counters.now.in_flight}/{counters.now.request_limit} in flight",
        f"{counters.pace.tokens_per_s:,.0f} tok/s",
        f"shm {amount(counters.now.shm_bytes)}",
        f"mean {counters.tokens_per_s:,.0f} tok/s",
        rate(counters.bytes_per_s),
    )

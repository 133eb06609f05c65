"""What a run shows, and how often."""

from __future__ import annotations

import io

from extractor.progress import (
    LINE_INTERVAL_S,
    BarReporter,
    Counters,
    LineReporter,
    reporter_for,
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_lines_come_at_intervals_however_often_the_run_reports() -> None:
    stream, clock = io.StringIO(), Clock()
    reporter = LineReporter(stream, clock=clock)
    counters = Counters(num_rows=10, settled_before=2, stored=1, failed=1)
    for _ in range(int(3.5 * LINE_INTERVAL_S)):
        clock.now += 1
        reporter.update(counters)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("4/10 rows, ")
    assert "1 failed" in lines[0]


def test_notes_are_shown_at_once() -> None:
    stream = io.StringIO()
    LineReporter(stream).note("a row failed")
    assert stream.getvalue() == "a row failed\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_and_a_log_gets_lines() -> None:
    assert isinstance(reporter_for(Terminal()), BarReporter)
    assert isinstance(reporter_for(io.StringIO()), LineReporter)


def test_a_bar_shows_what_is_settled_over_all_sessions() -> None:
    stream = Terminal()
    reporter = BarReporter(stream)
    reporter.close()  # before anything was shown
    reporter.update(Counters(num_rows=200, settled_before=50, stored=49, failed=1))
    reporter.note("a row failed")
    reporter.close()
    assert "100/200" in stream.getvalue()
    assert "a row failed" in stream.getvalue()


def test_rates_are_over_this_session() -> None:
    counters = Counters(tokens=1000, stored_bytes=2_000_000_000, started=0.0)
    assert counters.tokens_per_s == counters.tokens / counters.seconds or counters.seconds > 0
    assert 0 < counters.gigabytes_per_s <= 2e9

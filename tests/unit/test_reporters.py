"""What a run shows, and how often."""

from __future__ import annotations

import io
import json
import os
import pty
import termios
import time
from collections import Counter
from datetime import datetime

import pytest
from helpers import Notes

from extractor.core.counters import Counters, InputRows, Moment, ServerNow
from extractor.core.timings import DEFAULT_TIMINGS
from extractor.status.reporters import (
    MIN_BAR,
    BarReporter,
    JsonReporter,
    LineReporter,
    Together,
    reporter_for,
)
from manifest.states import Reason

ONE_FAILED = Counter({Reason.BAD_JSON: 1})


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_lines_come_at_intervals_however_often_the_run_reports() -> None:
    stream, clock = io.StringIO(), Clock()
    reporter = LineReporter(stream, clock=clock)
    counters = Counters(
        rows=InputRows(total=10, settled_before=2, stored=1, failed_by_reason=ONE_FAILED)
    )
    for _ in range(int(3.5 * DEFAULT_TIMINGS.status.line_interval_s)):
        clock.now += 1
        reporter.update(counters)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("4/10 rows, ")
    assert "1 failed" in lines[0]


def test_notes_are_shown_at_once() -> None:
    stream = io.StringIO()
    LineReporter(stream).report("a row failed")
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
    reporter.update(
        Counters(
            rows=InputRows(total=200, settled_before=50, stored=49, failed_by_reason=ONE_FAILED)
        )
    )
    reporter.report("a row failed")
    reporter.close()
    assert "100/200" in stream.getvalue()
    assert "a row failed" in stream.getvalue()


def test_a_bar_that_is_begun_again_takes_nothing_for_done_since() -> None:
    """After a wait for a server; tqdm's estimate is of what came behind `initial`."""
    reporter = BarReporter(Terminal())
    reporter.update(Counters(rows=InputRows(total=200, settled_before=50, stored=100)))
    assert reporter._bar is not None
    assert reporter._bar.initial == reporter._bar.n == 150
    reporter.close()


@pytest.mark.parametrize("num_rows", [20_000, 10_000_000])
def test_where_there_is_little_room_the_figures_that_matter_stay(num_rows: int) -> None:
    counters = Counters(rows=InputRows(total=num_rows, stored=num_rows // 4), tokens=10**9)
    counters.pace.started -= 1000
    counters.pace.note(0.0, tokens=0, rows=0)
    counters.pace.note(1.0, tokens=153_326, rows=0)
    counters.rows.failed_by_reason.update(ONE_FAILED)
    servers = (
        ServerNow(url="a", is_up=True, in_flight=5, request_limit=8, num_prompts=9),
        ServerNow(url="b", is_up=True, in_flight=7, request_limit=8, num_prompts=9),
    )
    counters.now = Moment(servers=servers)
    shown = {}
    for columns in (60, 80, 200):
        ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, columns))
        with open(theirs, "w") as stream:
            reporter = BarReporter(stream)
            reporter.update(counters)
            reporter.close()
            text = ""
            while not text.endswith("\n"):
                text += os.read(ours, 65536).decode()
        shown[columns] = text.rstrip().split("\r")[-1]
        os.close(ours)
        assert len(shown[columns]) <= columns
        bar = shown[columns].split("|")[1]
        assert len(bar) >= (MIN_BAR if columns > 60 else 1)
        assert "1 failed" in shown[columns]
    assert "12/16 in flight" in shown[80]
    assert ("153,326 tok/s" in shown[80]) == (num_rows == 20_000)
    assert "B/s]" in shown[200] and "mean" in shown[200] and "shm" in shown[200]


def test_rates_are_over_this_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 110.0)
    rows = InputRows(total=3000, settled_before=700, stored=926)
    counters = Counters(rows=rows, tokens=1000, stored_bytes=38_000_000)
    counters.pace.started = 100.0
    assert (counters.tokens_per_s, counters.bytes_per_s) == (100.0, 3_800_000.0)
    clock = Clock()
    reporter = LineReporter(stream := io.StringIO(), clock=clock)
    clock.now += DEFAULT_TIMINGS.status.line_interval_s
    reporter.update(counters)
    assert stream.getvalue().startswith("1,626/3,000 rows, 0 failed, ")
    assert stream.getvalue().endswith("mean 100 tok/s, 3.8 MB/s\n")


def test_a_log_for_programs_has_one_object_a_line() -> None:
    stream, clock = io.StringIO(), Clock()
    reporter = JsonReporter(stream, clock=clock)
    reporter.report("a row failed\nbadly", event="row_failed", level="warning", line=3)
    counters = Counters(rows=InputRows(total=10, stored=1, failed_by_reason=ONE_FAILED))
    reporter.update(counters)
    clock.now += DEFAULT_TIMINGS.status.line_interval_s
    reporter.update(counters)
    reporter.close()
    failed, progress = map(json.loads, stream.getvalue().splitlines())
    assert datetime.fromisoformat(failed.pop("time")).tzinfo is not None
    assert failed == {
        "level": "warning",
        "event": "row_failed",
        "message": "a row failed\nbadly",
        "line": 3,
    }
    assert (progress["event"], progress["level"]) == ("progress", "info")
    assert progress["session"]["failed_by_reason"] == {"bad_json": 1}


def test_a_log_for_programs_has_no_bar_even_in_a_terminal() -> None:
    assert isinstance(reporter_for(Terminal(), as_json=True), JsonReporter)


def test_several_reporters_are_told_the_same() -> None:
    first, second = Notes(), Notes()
    reporter = Together(first, second)
    reporter.update(Counters())
    reporter.report("a row failed", event="row_failed", level="warning", line=3)
    reporter.close()
    for notes in (first, second):
        assert (notes.num_updates, notes.messages, notes.is_closed) == (1, ["a row failed"], True)

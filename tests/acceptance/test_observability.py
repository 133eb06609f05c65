"""What can be seen of a run from outside: a page, lines, metrics, a log for programs."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from helpers import make_prompts, write_prompts

from acceptance.tool import Fake, Tool, fake_server, wait_until
from extractor.status.live_file import read_live
from extractor.status.overview import read_status
from manifest.states import State

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture
def prompts_path(tmp_path: Path) -> Path:
    path = write_prompts(tmp_path / "p.jsonl", make_prompts(12))
    path.write_text(path.read_text() + "{broken\n")
    return path


@contextmanager
def going_on(
    tool: Tool, prompts: Path, dump_root: Path, *arguments: object
) -> Iterator[subprocess.Popen[str]]:
    """A run whose requests get no answer, so that it goes on for as long as it is looked at."""
    out = tool.cwd / "out"
    with fake_server(dump_root, "--fault", "silent", "--fault-every", "13") as server:
        # 12 prompts behind one probe: the last is never answered.
        process = tool.start_run(prompts, out, server, *arguments)
        wait_until(lambda: is_all_told(out), what="11 samples and a bad row, in both files")
        yield process


def is_all_told(out: Path) -> bool:
    """Whether `.live.json` and the manifest have what was settled; they are written at their own
    times."""
    live = read_live(out)
    if live is None or (live.session["stored"], live.session["failed"]) != (11, 1):
        return False
    totals = read_status(out).begun.totals
    return (totals.by_state[State.STORED], totals.by_state.get(State.FAILED)) == (11, 1)


def interrupt(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Two signals: the second does not wait for what is in flight."""
    assert process.stderr is not None
    process.send_signal(signal.SIGINT)
    told = ""
    while "interrupt again" not in told:
        told += process.stderr.readline()
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate()
    assert process.returncode == 130
    return stdout, told + stderr


def test_watch_in_a_pipe_prints_lines_until_the_run_of_another_process_ends(
    tool: Tool, prompts_path: Path, dump_root: Path
) -> None:
    with going_on(tool, prompts_path, dump_root) as process:
        watching = tool.start("status", "out", "--watch")
        assert watching.stdout is not None
        first = watching.stdout.readline()
        assert f"process {process.pid} is at work" in first
        assert first.startswith("12/13 rows, 1 failed, ")
        assert "1 in flight" in first
        once = tool("status", "out").stdout
        assert once.startswith(f"out: process {process.pid} is at work\n")
        assert re.search(r"^planned +1\n  with a server +1\n  waiting for a mover +0$", once, re.M)
        interrupt(process)
        rest, errors = watching.communicate()
    left = "the run ended unfinished (1 row left); the same command goes on"
    once = tool("status", "out").stdout
    assert once.startswith(f"out: {left}\n")
    assert "with a server" not in once
    assert rest.splitlines()[-1].startswith("12/13 rows, 1 failed, ")
    assert rest.endswith(f"; {left}\n")
    assert (watching.returncode, errors) == (0, "")


def test_watch_in_a_terminal_is_a_page_that_ctrl_c_leaves(
    tool: Tool, prompts_path: Path, dump_root: Path
) -> None:
    with going_on(tool, prompts_path, dump_root) as process:
        ours, theirs = pty.openpty()
        watching = subprocess.Popen(
            [sys.executable, "-m", "extractor", "status", "out", "--watch"],
            cwd=tool.cwd, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"},
        )  # fmt: skip
        os.close(theirs)
        shown = ""

        def read_more() -> bool:
            nonlocal shown
            with suppress(OSError):  # EIO: nobody has it open any more
                shown += os.read(ours, 65536).decode(errors="replace")
            return shown.count("is at work") >= 2  # drawn anew

        wait_until(read_more, what="two pages")
        watching.send_signal(signal.SIGINT)
        assert watching.wait() == 0
        os.close(ours)
        interrupt(process)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "92.3 %  12 of 13 rows" in text
    assert "1 of 8" in text
    assert "bad_json  1" in text
    assert "dump lifetime" in text


def test_a_killed_run_is_over_for_whoever_watches(
    tool: Tool, prompts_path: Path, dump_root: Path
) -> None:
    with going_on(tool, prompts_path, dump_root) as process:
        process.kill()
        process.communicate()
        assert (tool.cwd / "out" / ".live.json").exists()
        watched = tool("status", "out", "--watch")
        assert watched.returncode == 0
        (line,) = watched.stdout.splitlines()
        assert line.endswith("; the run ended unfinished (1 row left); the same command goes on")
        assert tool("status", "out", "--json").json()["live"] is None


def test_a_run_that_is_started_in_the_same_moment_is_waited_for(
    tmp_path: Path, tool: Tool, fake: Fake, prompts_path: Path
) -> None:
    watching = tool.start("status", "out", "--watch")
    ran = tool.run(prompts_path, tmp_path / "out", fake)
    shown, errors = watching.communicate()
    assert (ran.returncode, watching.returncode, errors) == (1, 0, "")
    assert shown.endswith("; done\n")


def test_metrics_are_served_while_the_run_goes_on(
    tool: Tool, prompts_path: Path, dump_root: Path
) -> None:
    with going_on(tool, prompts_path, dump_root, "--metrics-port", 0) as process:
        assert process.stderr is not None
        url = process.stderr.readline().rsplit(maxsplit=1)[-1]
        assert url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(url, timeout=30) as reply:
            text = reply.read().decode()
        interrupt(process)
    assert "extractor_rows_stored_total 11.0" in text
    assert 'extractor_rows_failed_total{reason="bad_json"} 1.0' in text
    assert "extractor_requests_in_flight 1.0" in text
    assert 'extractor_stage_duration_seconds_count{stage="residency"} 11.0' in text


def test_metrics_that_cannot_be_served_are_told_before_anything_starts(
    tmp_path: Path, tool: Tool, fake: Fake, prompts_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = tool.run(prompts_path, tmp_path / "out", fake, "--metrics-port", port)
    assert ran.returncode == 2
    assert f"--metrics-port {port}: cannot listen on 127.0.0.1 (Address already in use)" in (
        ran.stderr
    )
    ran = tool.run(prompts_path, tmp_path / "out", fake, "--metrics-host", "127.0.0.1")
    assert ran.returncode == 2
    assert "--metrics-host without --metrics-port serves nothing" in ran.stderr
    (tmp_path / "prometheus_client.py").write_text("raise ModuleNotFoundError\n")
    python_path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    tool.environment = {"PYTHONPATH": python_path}
    ran = tool.run(prompts_path, tmp_path / "out", fake, "--metrics-port", 0)
    assert ran.returncode == 2
    assert "pip install 'hidden-state-extractor[metrics]'" in ran.stderr
    assert not (tmp_path / "out").exists()
    assert fake.requests() == 0


def test_a_log_for_programs_has_nothing_but_objects(
    tmp_path: Path, tool: Tool, fake: Fake, prompts_path: Path
) -> None:
    ran = tool.run(prompts_path, tmp_path / "out", fake, "--log-json", "--json")
    assert ran.returncode == 1
    lines = [json.loads(line) for line in ran.stderr.splitlines()]
    assert all({"time", "level", "event", "message"} <= set(line) for line in lines)
    (failed,) = [line for line in lines if line["event"] == "row_failed"]
    assert (failed["line"], failed["reason"], failed["level"]) == (13, "bad_json", "warning")
    assert (lines[-1]["event"], lines[-1]["level"]) == ("finished", "info")
    assert lines[-1]["exit_status"] == 1
    assert {name: lines[-1][name] for name in ran.json()} == ran.json()
    session = ran.json()["session"]
    assert session["failed_by_reason"] == {"bad_json": 1}
    assert session["stages"]["residency"]["count"] == 12
    assert session["stages"]["copy"]["count"] == 12


def test_a_log_for_programs_has_the_errors_too(tool: Tool) -> None:
    ran = tool("run", "nowhere.jsonl", "--log-json")
    assert ran.returncode == 2
    (line,) = map(json.loads, ran.stderr.splitlines())
    assert (line["event"], line["level"], line["exit_status"]) == ("error", "error", 2)
    assert "nowhere.jsonl: no such file" in line["message"]
    assert "traceback" not in line
    ran = tool("-v", "run", "nowhere.jsonl", "--log-json")
    (line,) = map(json.loads, ran.stderr.splitlines())
    assert line["traceback"][0].startswith("Traceback")
    ran = tool("run", "nowhere.jsonl", "--log-json", "--movers", "none")  # click's own errors
    (line,) = map(json.loads, ran.stderr.splitlines())
    assert (line["event"], line["exit_status"], ran.returncode) == ("error", 2, 2)
    assert "'none' is not a valid integer" in line["message"]
    tool.environment = {"EXTRACTOR_RUN_LOG_JSON": "1"}
    (line,) = map(json.loads, tool("run").stderr.splitlines())
    assert "PROMPTS" in line["message"]
    assert tool("status", "out", "--watch", "--json").returncode == 2

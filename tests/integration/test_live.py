"""What a run tells other processes: `.live.json`, `status --watch`, and the metrics."""

from __future__ import annotations

import io
import json
import os
import socket
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import Notes, make_prompts, options_for, write_prompts
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, RenderableType

from extractor.core.counters import Counters, InputRows, Moment, ServerNow, Stage
from extractor.core.errors import MissingExtra, OutputBusy, UsageError
from extractor.core.timings import DEFAULT_TIMINGS, StatusTimings, Timings
from extractor.pipeline.run import run
from extractor.status.live_file import LIVE_NAME, LiveFile, live_problem, read_live
from extractor.status.overview import read_status
from extractor.status.page import line, page
from extractor.status.prometheus import Metrics, served_metrics
from extractor.status.report import session_document
from extractor.status.watcher import Begun, Look, Watcher, watch
from extractor.system.lock import LOCK_NAME, exclusive, writer_of
from extractor.testing.fake_server import FakeServer
from manifest.exceptions import ManifestMissing
from manifest.states import Reason, State
from server_patch.directory import Directory

REPOSITORY = Path(__file__).parents[2]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def written(file: LiveFile) -> None:
    """Wait for what is being written."""
    if file._writing is not None:
        file._writing.result()


def some_counters() -> Counters:
    counters = Counters(rows=InputRows(total=10, stored=4), tokens=400, stored_bytes=4000)
    counters.rows.failed_by_reason[Reason.TOO_LONG] += 1
    counters.observe(
        Moment(
            servers=(
                ServerNow(
                    url="http://a:1", is_up=True, in_flight=3, request_limit=8, num_prompts=6
                ),
                ServerNow(
                    url="http://b:2", is_up=False, in_flight=0, request_limit=0, num_prompts=4
                ),
            ),
            shm_bytes=100,
            peak_shm_bytes=300,
            budget_bytes=1000,
            budget_queue=2,
            mover_queue=5,
        )
    )
    counters.stages[Stage.RESIDENCY].add(0.02)
    return counters


def drawn(picture: RenderableType, *, width: int) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width, no_color=True).print(picture)
    return stream.getvalue()


# --- the file -------------------------------------------------------------------------------------


def test_another_process_reads_what_a_session_says_until_it_ends(tmp_path: Path) -> None:
    assert read_live(tmp_path) is None
    file = LiveFile(Directory.open(tmp_path))
    file.update(some_counters())
    written(file)
    live = read_live(tmp_path)
    assert live is not None
    assert live.pid == os.getpid()
    assert live.age_s < 60
    assert live.session["now"]["in_flight"] == 3
    file.close()
    assert read_live(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    file.update(some_counters())  # the next session of the same process
    written(file)
    assert read_live(tmp_path) is not None
    file.close()


def test_it_is_written_once_a_second_however_often_the_run_reports(tmp_path: Path) -> None:
    clock = Clock()
    file = LiveFile(Directory.open(tmp_path), clock=clock)
    counters, seen = some_counters(), set()
    for _ in range(30):
        clock.now += 0.1
        counters.rows.stored += 1
        file.update(counters)
        written(file)
        live = read_live(tmp_path)
        assert live is not None
        seen.add(live.session["stored"])
    file.close()
    assert len(seen) == 3


def test_a_killed_run_is_not_taken_for_a_live_one(tmp_path: Path) -> None:
    """Its pid may be somebody else's by now: the start time tells."""
    file = LiveFile(Directory.open(tmp_path))
    file.update(some_counters())
    written(file)
    path = tmp_path / LIVE_NAME
    document = json.loads(path.read_bytes())
    path.write_text(json.dumps({**document, "pid_start_ticks": document["pid_start_ticks"] + 1}))
    assert read_live(tmp_path) is None
    path.write_text(json.dumps({**document, "pid": 2**22 + 1}))
    assert read_live(tmp_path) is None
    file.close()


def test_a_process_that_cannot_be_seen_is_believed_for_half_a_minute(tmp_path: Path) -> None:
    document = {
        "pid": 1, "pid_start_ticks": 1, "pid_namespace": "pid:[1]", "written_at": time.time(),
        "session": session_document(some_counters()),
    }  # fmt: skip
    (tmp_path / LIVE_NAME).write_text(json.dumps(document))
    assert read_live(tmp_path) is not None
    old = {**document, "written_at": time.time() - DEFAULT_TIMINGS.status.stale_s - 1}
    (tmp_path / LIVE_NAME).write_text(json.dumps(old))
    assert read_live(tmp_path) is None


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"pid": 1}', '{"pid": "x"}'])
def test_a_torn_file_is_nobody(tmp_path: Path, content: str) -> None:
    (tmp_path / LIVE_NAME).write_text(content)
    assert read_live(tmp_path) is None
    assert "is not what a session writes" in (live_problem(tmp_path) or "")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("pid",), 1e400), (("pid",), True), (("written_at",), "now"), (("written_at",), 2**70),
        (("session",), []), (("session", "now"), {}), (("session", "now", "servers"), {}),
        (("session", "now", "servers"), [{}]), (("session", "seconds"), None),
        (("session", "stages", "copy"), {"count": 1}), (("session", "stages"), {"copy": {}}),
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_file_means_no_live_run_and_breaks_no_display(
    tmp_path: Path, place: tuple[str, ...], value: object
) -> None:
    file = LiveFile(Directory.open(tmp_path))
    file.update(some_counters())
    written(file)
    assert live_problem(tmp_path) is None
    document = json.loads((tmp_path / LIVE_NAME).read_bytes())
    inner = document
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    (tmp_path / LIVE_NAME).write_text(json.dumps(document))
    assert read_live(tmp_path) is None
    assert live_problem(tmp_path) is not None
    file.close()


def test_a_pipe_in_place_of_the_file_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LIVE_NAME)
    os.mkfifo(tmp_path / LOCK_NAME)
    assert read_live(tmp_path) is None
    assert writer_of(tmp_path) is None
    assert live_problem(tmp_path) == f"{tmp_path / LIVE_NAME}: not a regular file"


def test_a_disk_that_takes_nothing_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    gone = Directory.open(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    file = LiveFile(gone)
    file.update(some_counters())
    assert file._writing is not None  # it is tried
    written(file)
    file.close()
    assert list(tmp_path.iterdir()) == []


# --- the watcher ----------------------------------------------------------------------------------


async def test_a_run_is_watched_from_its_first_prompt_to_its_end(
    dump_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looks are taken at each report of the run, which is of this process: the lock's holder is
    taken for another one here."""
    monkeypatch.setattr(
        "extractor.status.watcher.writer_of",
        lambda out: 17 if (out / LOCK_NAME).read_text() else None,
    )
    out = tmp_path / "out"
    prompts = write_prompts(tmp_path / "p.jsonl", make_prompts(60))
    prompts.write_text(prompts.read_text() + "nonsense\n")
    watcher = Watcher(out)
    looks: list[Look] = []

    quick = Timings(status=StatusTimings(report_interval_s=0.01, live_interval_s=0.0))

    class Watching(Notes):
        def update(self, counters: Counters) -> None:
            looks.append(watcher.look())

    async with FakeServer(dump_root).running() as server:
        await run(options_for(server, prompts, out), Watching(), timings=quick)
    assert looks
    assert all(look.writer == 17 and not look.is_over for look in looks)
    assert any(look.live is not None for look in looks)
    assert all(look.begun is not None and look.begun.num_rows == 61 for look in looks)
    last = watcher.look()
    assert last.is_over
    assert last.begun is not None
    assert last.begun.totals.by_state == {State.STORED: 60, State.FAILED: 1}
    assert last.live is not None  # what was seen last stays to be read
    assert not (out / LIVE_NAME).exists()


async def test_a_run_that_waits_for_its_server_is_not_shown_at_work(
    dump_root: Path, tmp_path: Path, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is gone meanwhile; what it said before is of a server that is no more."""
    out = tmp_path / "out"
    prompts = write_prompts(tmp_path / "p.jsonl", make_prompts(5))
    async with FakeServer(dump_root).running() as server:
        await run(options_for(server, prompts, out), notes)
    monkeypatch.setattr("extractor.status.watcher.writer_of", lambda out: 17)
    watcher = Watcher(out)
    file = LiveFile(Directory.open(out))
    file.update(some_counters())
    written(file)
    assert "3 in flight" in line(watcher.look())
    file.close()
    look = watcher.look()
    assert "in flight" not in line(look)
    assert "17 is idle" in line(look)
    assert "in flight" not in drawn(page(look), width=80)


def test_where_nothing_runs_it_is_waited_for_a_while(tmp_path: Path) -> None:
    clock = Clock()
    with pytest.raises(ManifestMissing):
        watch(tmp_path, lambda look: None, interval_s=1.0, sleep=clock.sleep, clock=clock)
    assert clock.now - 100.0 == DEFAULT_TIMINGS.status.patience_s


@pytest.mark.parametrize("comes", [True, False])
async def test_an_unfinished_run_may_be_about_to_go_on(
    comes: bool, tmp_path: Path, dump_root: Path, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is seen of a killed run and of one that starts again in this moment is the same."""
    out, clock, shown = tmp_path / "out", Clock(), list[str]()
    prompts = write_prompts(tmp_path / "p.jsonl", make_prompts(5))
    async with FakeServer(dump_root).running() as server:
        await run(options_for(server, prompts, out), notes)
    monkeypatch.setattr(Begun, "num_left", 3)
    writers = iter([None, None, *([17] if comes else []), *[None] * 9])
    monkeypatch.setattr("extractor.status.watcher.writer_of", lambda out: next(writers))
    watch(
        out, lambda look: shown.append(line(look)), interval_s=30.0, sleep=clock.sleep, clock=clock
    )
    assert shown[-1].endswith("; the run ended unfinished (3 rows left); the same command goes on")
    assert [("process 17" in one) for one in shown] == ([True, False] if comes else [False])
    assert clock.now - 100.0 == (3 if comes else DEFAULT_TIMINGS.status.patience_s)


async def test_a_finished_run_is_shown_once(dump_root: Path, tmp_path: Path, notes: Notes) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", make_prompts(5))
    async with FakeServer(dump_root).running() as server:
        await run(options_for(server, prompts, tmp_path / "out"), notes)
    shown: list[Look] = []

    def sleep(seconds: float) -> None:
        raise AssertionError("there is nothing to wait for")

    last = watch(tmp_path / "out", shown.append, interval_s=1.0, sleep=sleep)
    assert shown == [last]
    assert line(last).startswith("5/5 rows, 0 failed, ")
    assert line(last).endswith("; done")
    assert "out  done" in drawn(page(last), width=60)
    assert not (tmp_path / "out" / "manifest.sqlite-wal").exists()


def test_a_run_that_only_starts_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No manifest yet, but the lock is held; then the process goes and nothing was begun."""
    writers = iter([17, 17, None])
    monkeypatch.setattr("extractor.status.watcher.writer_of", lambda out: next(writers))
    shown: list[str] = []
    pauses: list[float] = []
    with pytest.raises(ManifestMissing):
        watch(tmp_path, lambda look: shown.append(line(look)), interval_s=0.0, sleep=pauses.append)
    assert shown == [f"{tmp_path}: process 17 is starting"] * 2
    assert pauses == [DEFAULT_TIMINGS.status.look_interval_s] * 2


def test_an_end_is_shown_at_once_and_other_looks_at_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    looks = iter([Look(out=tmp_path, begun=None, live=None, writer=w) for w in [7] * 65 + [None]])
    monkeypatch.setattr(Watcher, "look", lambda self: next(looks))
    shown: list[float] = []
    watch(
        tmp_path,
        lambda look: shown.append(clock.now),
        interval_s=30.0,
        sleep=clock.sleep,
        clock=clock,
    )
    assert shown == [100.0, 130.0, 160.0, 165.0]


# --- what is shown --------------------------------------------------------------------------------


async def test_the_page_says_all_of_it_in_any_width(
    dump_root: Path, tmp_path: Path, notes: Notes
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", make_prompts(5))
    prompts.write_text(prompts.read_text() + "nonsense\n")
    out = tmp_path / "out"
    async with FakeServer(dump_root).running() as server:
        await run(options_for(server, prompts, out), notes)
    file = LiveFile(Directory.open(out))
    file.update(some_counters())
    written(file)
    look = Watcher(out).look()
    file.close()
    assert look.writer == os.getpid()
    for width in (40, 80, 200):
        assert drawn(page(look), width=width)
    for width in (60, 80, 200):
        assert "…" not in drawn(page(look), width=width)
    assert look.live is not None
    many = {"count": 1_000_000, "p50_ms": 22.4, "p99_ms": 40.6, "max_ms": 99.9}
    stages = {name: figures | many for name, figures in look.live.session["stages"].items()}
    busy = replace(look.live, session={**look.live.session, "stages": stages})
    assert "…" not in drawn(page(replace(look, live=busy)), width=60)
    over = drawn(page(replace(look, writer=None)), width=60)
    assert "as last reported" in over
    assert "time left" in over and "in flight" not in over
    text = " ".join(drawn(page(look), width=100).split())  # a long path breaks the line
    for what in (
        "100.0 %", "6 of 6 rows", "3 of 8", "100 B of 1000 B", "bad_json", "is at work",
        "dump lifetime", "20.0 ms", "speed now", "mean speed", "time left", "boundaries",
        "http://a:1", "away", "answered",
    ):  # fmt: skip
        assert what in text, (what, text)
    assert "3 in flight, 1 of 2 servers up, shm 100 B of 1000 B" in line(look)
    assert "dump lifetime 20.0 ms p50, 20.0 ms p99" in line(look)


async def test_status_as_json_has_the_live_session(
    dump_root: Path, tmp_path: Path, notes: Notes
) -> None:
    out = tmp_path / "out"
    prompts = write_prompts(tmp_path / "p.jsonl", make_prompts(5))
    async with FakeServer(dump_root).running() as server:
        await run(options_for(server, prompts, out), notes)
    assert read_status(out).to_document()["live"] is None
    file = LiveFile(Directory.open(out))
    file.update(some_counters())
    written(file)
    assert read_status(out).to_document()["live"]["now"]["in_flight"] == 3
    file.close()


# --- metrics --------------------------------------------------------------------------------------


def scraped(url: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    with urllib.request.urlopen(url, timeout=30) as reply:
        text = reply.read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_scrape_shows_the_counters_of_the_moment() -> None:
    metrics, counters = Metrics(), some_counters()
    with served_metrics(metrics, port=0) as url:
        assert url.startswith("http://127.0.0.1:")
        assert scraped(url) == {}
        metrics.update(counters)
        counters.rows.stored += 1
        values = scraped(url)
    none: frozenset[tuple[str, str]] = frozenset()
    assert values["extractor_rows_stored_total", none] == 5
    assert values["extractor_tokens_total", none] == 400
    assert values["extractor_rows_failed_total", frozenset({("reason", "too_long")})] == 1
    for reason in set(Reason) - {Reason.TOO_LONG}:
        assert values["extractor_rows_failed_total", frozenset({("reason", reason.value)})] == 0
    assert values["extractor_requests_in_flight", none] == 3
    for url, up, in_flight, limit, prompts in (
        ("http://a:1", 1, 3, 8, 6),
        ("http://b:2", 0, 0, 0, 4),
    ):
        of_server = frozenset({("server", url)})
        assert values["extractor_server_up", of_server] == up
        assert values["extractor_server_requests_in_flight", of_server] == in_flight
        assert values["extractor_server_requests_limit", of_server] == limit
        assert values["extractor_server_prompts_total", of_server] == prompts
    assert values["extractor_budget_used_bytes", none] == 100
    assert values["extractor_queue_length", frozenset({("queue", "mover")})] == 5
    name = "extractor_stage_duration_seconds"
    stage = ("stage", "residency")
    assert values[f"{name}_bucket", frozenset({stage, ("le", "0.01")})] == 0
    assert values[f"{name}_bucket", frozenset({stage, ("le", "0.02")})] == 1
    assert values[f"{name}_bucket", frozenset({stage, ("le", "+Inf")})] == 1
    assert values[f"{name}_count", frozenset({stage})] == 1
    assert values[f"{name}_sum", frozenset({stage})] == 0.02


def test_every_metric_and_stage_is_in_the_documentation() -> None:
    page_of_docs = (REPOSITORY / "docs" / "observability.md").read_text()
    metrics = Metrics()
    metrics.update(some_counters())
    for family in metrics.collect():
        for sample in family.samples:
            name = sample.name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum")
            assert f"`{name}`" in page_of_docs or f"`{name}{{" in page_of_docs, name
    assert all(f"| `{stage}` |" in page_of_docs for stage in Stage)


def test_a_port_that_is_taken_is_told_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = f"--metrics-port {port}: cannot listen on 127.0.0.1"
        with pytest.raises(UsageError, match=refused), served_metrics(Metrics(), port=port):
            pass


def test_without_the_package_the_pip_line_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    pip = r"pip install 'hidden-state-extractor\[metrics\]'"
    with pytest.raises(MissingExtra, match=pip), served_metrics(Metrics(), port=0):
        pass


# --- the lock -------------------------------------------------------------------------------------


async def test_a_run_that_is_refused_leaves_the_files_of_the_one_at_work(
    dump_root: Path, tmp_path: Path, notes: Notes
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", make_prompts(5))
    async with FakeServer(dump_root).running() as server:
        with exclusive(tmp_path):
            file = LiveFile(Directory.open(tmp_path))
            file.update(some_counters())
            written(file)
            with pytest.raises(OutputBusy):
                await run(options_for(server, prompts, tmp_path), notes)
            assert read_live(tmp_path) is not None
            file.close()


async def test_what_a_killed_run_left_goes_with_the_next(
    dump_root: Path, tmp_path: Path, notes: Notes
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", make_prompts(5))
    (tmp_path / LIVE_NAME).write_text("{}")
    async with FakeServer(dump_root).running() as server:
        await run(options_for(server, prompts, tmp_path), notes)
    assert not (tmp_path / LIVE_NAME).exists()

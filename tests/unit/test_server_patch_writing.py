"""Ring, staging, files and threads: from tensors to whole files, on the CPU."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import read_header
from hypothesis import given
from hypothesis import strategies as st

from server_patch import directory as directories
from server_patch import request_log
from server_patch.directory import Directory
from server_patch.dump_dir import RankDir
from server_patch.dump_format import (
    StateLayout,
    WeightsInfo,
    decode_error,
    is_dump_name,
    is_error_name,
)
from server_patch.ring import Ring, RingError, plan_ring
from server_patch.sglang_api import PrefillBatch
from server_patch.slot_layout import SlotLayout
from server_patch.staging import CpuStager, StagingError, States, gather
from server_patch.stats import STATS_NAME, Stats
from server_patch.tap import Tap
from server_patch.weights import Weights
from server_patch.writer_pool import WriterPool, _split
from server_patch.writer_process import DumpWriter
from server_patch.writer_protocol import (
    MAX_MESSAGE_BYTES,
    MAX_PIECES,
    Assignment,
    Job,
    RingPlan,
    SlotPiece,
)
from server_patch.writer_supervisor import WriterSupervisor

K, H = 3, 4
STATES = StateLayout(boundaries=(2, 4, 5), hidden_size=H, dtype="F32", last_kind="both")
LAYOUT = SlotLayout(STATES)


def make_states(rows: int, *, packed: bool = False, ids: list[int] | None = None) -> States:
    """Row r of boundary i holds 100 * r + 10 * i + column."""
    base = 100.0 * torch.arange(rows).unsqueeze(1) + torch.arange(H)
    aux: Any = [base + 10 * i for i in range(K)]
    if packed:
        aux = torch.cat(aux, dim=-1)
    input_ids = torch.tensor(ids) if ids is not None else torch.arange(rows)
    return States(aux=aux, last=base + 1000, last_pre=base + 2000, input_ids=input_ids)


def make_batch(lens: list[int], rids: list[str] | None = None, **extra: Any) -> PrefillBatch:
    rids = rids or [f"xtr-{i}" for i in range(len(lens))]
    fields: dict[str, Any] = {
        "rids": rids,
        "extend_lens": lens,
        "prefix_lens": [0] * len(lens),
        "prompt_lens": None,
        "live_rows": sum(lens),
        "input_ids": torch.arange(sum(lens)),
    }
    return PrefillBatch(**{**fields, **extra})


RIGS: list[Rig] = []


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    while RIGS:
        RIGS.pop().supervisor.stop()


class Rig:
    """A tap with everything behind it, in one directory."""

    def __init__(
        self,
        directory: Path,
        *,
        slot_rows: int = 64,
        num_slots: int = 2,
        start: bool = True,
        stager: Any = None,
        clock: Callable[[], float] = time.monotonic,
        log_level: str | None = None,
    ) -> None:
        RIGS.append(self)
        self.directory = directory
        self.weights = Weights(boot_id="boot")
        slot_bytes = LAYOUT.size_bytes(slot_rows) // 256 * 256 + 256
        self.ring = Ring(
            RingPlan(
                num_slots=num_slots,
                slot_rows=slot_rows,
                slot_bytes=slot_bytes,
                total_bytes=num_slots * slot_bytes,
            ),
            pinned=False,
        )
        stager = stager or CpuStager()

        place = Directory.open(directory)
        rank_dir = RankDir(directory=place, boot_id="boot", rank=1, file_mode=0o640)
        self.stats = Stats(rank_dir)
        self.assignment = Assignment(
            rank_dir=rank_dir,
            states=STATES,
            ring=self.ring.plan,
            ring_descriptor=self.ring.descriptor,
            log_level=log_level,
        )
        self.supervisor = WriterSupervisor(self.assignment, clock=clock)
        self.writers = WriterPool(
            self.supervisor,
            num_writers=2,
            rank_dir=rank_dir,
            ring=self.ring,
            stager=stager,
            stats=self.stats,
        )
        self.tap = Tap(
            rid_prefix="xtr-",
            layout=LAYOUT,
            ring=self.ring,
            stager=stager,
            writers=self.writers,
            stats=self.stats,
            weights=self.weights,
        )
        if start:
            self.writers.start()

    def names(self, wanted: Callable[[str], bool]) -> list[str]:
        return sorted(name for name in os.listdir(self.directory) if wanted(name))

    def wait(self, *, dumps: int = 0, errors: int = 0) -> None:
        until = time.monotonic() + 10
        while (len(self.names(is_dump_name)), len(self.names(is_error_name))) != (dumps, errors):
            assert time.monotonic() < until, os.listdir(self.directory)
            time.sleep(0.005)

    def dumps(self) -> Iterator[tuple[Any, dict[str, torch.Tensor]]]:
        for name in self.names(is_dump_name):
            path = self.directory / name
            found = read_header(path)
            data = bytearray(path.read_bytes())
            tensors = {
                tensor: torch.frombuffer(
                    data,
                    dtype=torch.int32 if span.dtype == "I32" else torch.float32,
                    count=span.size_bytes // 4,
                    offset=span.begin,
                ).view(span.shape)
                for tensor, span in found.tensors.items()
            }
            yield found.header, tensors

    def reasons(self) -> dict[str, str]:
        records = [
            decode_error((self.directory / name).read_bytes()) for name in self.names(is_error_name)
        ]
        return {record.rid: record.reason for record in records}


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def assert_rows(header: Any, tensors: dict[str, torch.Tensor], first_row: int) -> None:
    """The dump holds rows first_row .. of `make_states`."""
    truth = make_states(200)
    rows = slice(first_row, first_row + header.rows)
    assert torch.equal(tensors["aux"], torch.cat(truth.aux, dim=-1)[rows])
    assert torch.equal(tensors["last"], truth.last[rows])
    assert truth.last_pre is not None
    assert torch.equal(tensors["last_pre"], truth.last_pre[rows])
    assert torch.equal(tensors["input_ids"], truth.input_ids[rows].int())


@pytest.mark.parametrize("packed", [False, True])
def test_each_request_gets_its_own_rows(rig: Rig, packed: bool) -> None:
    batch = make_batch([7, 5, 9], ["xtr-a", "other", "xtr-b"], prefix_lens=[0, 0, 32])
    rig.tap.take(batch, make_states(24, packed=packed))  # 3 rows of padding
    rig.wait(dumps=2)
    (a, a_tensors), (b, b_tensors) = rig.dumps()
    assert (a.rid, a.start, a.rows, a.counter) == ("xtr-a", 0, 7, 0)
    assert (b.rid, b.start, b.rows, b.counter) == ("xtr-b", 32, 9, 1)
    assert (a.boot_id, a.rank) == ("boot", 1)
    assert (a.layout.boundaries, a.layout.last_kind) == ((2, 4, 5), "both")
    assert_rows(a, a_tensors, 0)
    assert_rows(b, b_tensors, 12)
    assert (rig.directory / "0000000000.safetensors").stat().st_mode & 0o777 == 0o640
    assert not list(rig.directory.glob(".tmp-*"))


def test_a_dump_names_the_weights_of_its_forward(tmp_path: Path) -> None:
    """Every part of a job keeps the id of its own forward, even if the write is delayed."""
    rig = Rig(tmp_path, start=False)
    before = WeightsInfo(id="before", layout="l", seconds=0)
    rig.weights.loaded(before)
    rig.tap.take(make_batch([3, 4]), make_states(7))
    rig.weights.updated()
    rig.tap.take(make_batch([5], ["xtr-after"]), make_states(5))
    rig.writers.start()
    rig.wait(dumps=3)
    assert {header.rid: header.weights for header, _ in rig.dumps()} == {
        "xtr-0": "before",
        "xtr-1": "before",
        "xtr-after": rig.weights.info.id,
    }


def test_a_forward_larger_than_a_slot_is_split(tmp_path: Path) -> None:
    rig = Rig(tmp_path, slot_rows=10)
    rig.tap.take(make_batch([25, 3, 4]), make_states(32))
    rig.wait(dumps=6)
    pieces = sorted((header.rid, header.start, header.rows) for header, _ in rig.dumps())
    assert pieces == [
        ("xtr-0", 0, 10),
        ("xtr-0", 10, 10),
        ("xtr-0", 20, 5),
        ("xtr-1", 0, 3),
        ("xtr-2", 0, 2),
        ("xtr-2", 2, 2),
    ]
    begins = {"xtr-0": 0, "xtr-1": 25, "xtr-2": 28}
    for header, tensors in rig.dumps():
        assert_rows(header, tensors, begins[header.rid] + header.start)


def test_a_full_ring_makes_the_forward_wait_and_drops_nothing(tmp_path: Path) -> None:
    rig = Rig(tmp_path, num_slots=2, start=False)
    done = threading.Event()

    def forwards() -> None:
        for _ in range(5):
            rig.tap.take(make_batch([3]), make_states(3))
        done.set()

    thread = threading.Thread(target=forwards)
    thread.start()
    assert not done.wait(0.2)  # two slots are filled, the third forward waits
    assert rig.stats.snapshot()["forwards"] == 2
    rig.writers.start()
    assert done.wait(10)
    thread.join()
    rig.wait(dumps=5)
    until = time.monotonic() + 10
    while (counters := rig.stats.snapshot())["pieces"] < 5:  # a report follows its files
        assert time.monotonic() < until
        time.sleep(0.005)
    assert counters["forwards"] == counters["pieces"] == 5
    assert 0.1 < counters["ring_wait_seconds"] <= counters["tap_seconds"]


def test_a_batch_that_contradicts_itself_becomes_error_records(rig: Rig) -> None:
    rig.tap.take(make_batch([7, 5], ["xtr-a", "other"], live_rows=13), make_states(16))
    rig.wait(errors=1)
    assert "requests have 12 rows, the batch 13" in rig.reasons()["xtr-a"]
    rig.tap.take(make_batch([4]), make_states(4))  # and the next forward is fine
    rig.wait(dumps=1, errors=1)


def test_states_of_another_shape_or_dtype_become_error_records(rig: Rig) -> None:
    good = make_states(4)
    wrong = [
        States(aux=good.aux[:2], last=good.last, last_pre=good.last_pre, input_ids=good.input_ids),
        States(aux=good.aux, last=good.last, last_pre=None, input_ids=good.input_ids),
        States(
            aux=[part[:2] for part in good.aux],
            last=good.last,
            last_pre=good.last_pre,
            input_ids=good.input_ids,
        ),
        States(
            aux=[good.aux[0], good.aux[1].double(), good.aux[2]],
            last=good.last,
            last_pre=good.last_pre,
            input_ids=good.input_ids,
        ),
    ]
    for number, states in enumerate(wrong):
        with pytest.raises(StagingError):
            states.check(LAYOUT)
        rig.tap.take(make_batch([4], [f"xtr-{number}"]), states)
    rig.wait(errors=4)
    reasons = rig.reasons()
    assert "3 boundaries are armed, 2 were captured" in reasons["xtr-0"]
    assert "final norm" in reasons["xtr-1"]
    assert "aux[0] is [2, 4], must be [4, 4]" in reasons["xtr-2"]
    assert "aux[1] is torch.float64, the model's states are F32" in reasons["xtr-3"]


def test_a_copy_that_fails_gives_the_slot_back(tmp_path: Path) -> None:
    class Broken(CpuStager):
        def stage(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("no copy")

    rig = Rig(tmp_path, num_slots=2, stager=Broken())
    for i in range(5):
        rig.tap.take(make_batch([3], [f"xtr-{i}"]), make_states(3))
    rig.wait(errors=5)
    assert "RuntimeError: no copy" in rig.reasons()["xtr-4"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_a_file_that_does_not_fit_becomes_an_error_record(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real = os.writev
    filled = threading.Event()

    def writev(descriptor: int, buffers: list[memoryview]) -> int:
        if sum(len(part) for part in buffers) < 300:
            return real(descriptor, buffers)  # an error record
        if filled.is_set():
            raise OSError(number, os.strerror(number))
        filled.set()
        return real(descriptor, [buffers[0][:10]])

    monkeypatch.setattr(os, "writev", writev)
    ring_bytes = rig.ring.plan.total_bytes
    writer = DumpWriter(rig.assignment, memoryview(bytearray(ring_bytes)))  # here, not in a process
    pieces = [SlotPiece(rid="xtr-0", start=0, begin=0, rows=9, counter=0)]
    report = writer.write(Job(slot=1, slot_rows=9, pieces=pieces))
    assert (report.pieces, report.errors, report.errors_lost) == (0, 1, 0)
    assert os.strerror(number) in rig.reasons()["xtr-0"]
    assert not list(rig.directory.glob(".tmp-*"))
    assert rig.names(is_error_name) == ["0000000000.error.json"]  # the dump's own number
    monkeypatch.undo()
    report = writer.write(Job(slot=1, slot_rows=9, pieces=pieces))
    assert (report.pieces, report.rows, report.errors) == (1, 9, 0)


def test_a_job_too_long_for_a_message_becomes_error_records(tmp_path: Path) -> None:
    """A rid may have any length; a job that a socket refuses must not shift the next ones'
    reports, and so give away slots that are still being read."""
    rig = Rig(tmp_path, num_slots=2)
    endless = "xtr-" + "x" * 600_000
    for number in range(4):  # more forwards than slots
        rig.tap.take(make_batch([3, 4], [endless, f"xtr-{number}"]), make_states(7))
    rig.tap.take(make_batch([5], ["xtr-after"]), make_states(5))
    rig.wait(dumps=1, errors=8)
    ((header, tensors),) = rig.dumps()
    assert header.rid == "xtr-after"
    assert_rows(header, tensors, 0)
    assert set(rig.reasons()) == {endless, *(f"xtr-{number}" for number in range(4))}
    assert "handing over failed: OSError" in rig.reasons()[endless]
    until = time.monotonic() + 10
    while any(writer.given for writer in rig.supervisor._writers):  # each job has its own report
        assert time.monotonic() < until
        rig.writers.take_reports(timeout_s=0.1)


def test_a_killed_writer_process_is_replaced_and_its_work_recorded(tmp_path: Path) -> None:
    copied = threading.Event()

    class Slow(CpuStager):
        def wait(self, slot: Any) -> None:
            assert copied.wait(10)

    rig = Rig(tmp_path, stager=Slow())
    victims = [writer.process for writer in rig.supervisor._writers]
    rig.tap.take(make_batch([5]), make_states(5))
    copied.set()
    rig.wait(dumps=1)  # so at least one writer has done work
    for process in victims:
        process.send_signal(signal.SIGSTOP)
    rig.tap.take(make_batch([5, 6], ["xtr-a", "xtr-b"]), make_states(11))
    until = time.monotonic() + 10
    while not any(writer.given for writer in rig.supervisor._writers):
        assert time.monotonic() < until
        time.sleep(0.005)
    # What a writer leaves that dies in the middle of a file.
    for dying in rig.supervisor._writers:
        (tmp_path / f".tmp-{dying.token}0123").write_bytes(b"half")
    (tmp_path / ".tmp-of-another").write_bytes(b"half")
    for process in victims:
        process.kill()
    rig.wait(dumps=1, errors=2)
    assert [path.name for path in tmp_path.glob(".tmp-*")] == [".tmp-of-another"]
    assert "ended with status -9" in rig.reasons()["xtr-a"]
    while not (left := rig.supervisor._writers) or any(w.process in victims for w in left):
        assert time.monotonic() < until
        time.sleep(0.005)
    for number in range(4):  # more forwards than slots: none was lost, and a writer is there
        rig.tap.take(make_batch([5], [f"xtr-{number}"]), make_states(5))
    rig.wait(dumps=5, errors=2)
    rig.supervisor.stop()


def test_writers_that_stand_still_do_not_stop_the_server(tmp_path: Path) -> None:
    """While the ring is full the forward waits, and a server that waits too long is ended by its
    own watchdog."""
    skipped_s = 0.0
    rig = Rig(tmp_path, num_slots=2, clock=lambda: time.monotonic() + skipped_s)
    victims = [writer.process for writer in rig.supervisor._writers]
    for process in victims:
        process.send_signal(signal.SIGSTOP)

    def forwards() -> None:
        for number in range(3):  # more than there are slots
            rig.tap.take(make_batch([5], [f"xtr-{number}"]), make_states(5))

    thread = threading.Thread(target=forwards, daemon=True)
    thread.start()
    until = time.monotonic() + 10
    while sum(len(writer.given) for writer in rig.supervisor._writers) < 2:
        assert time.monotonic() < until
        time.sleep(0.005)
    assert thread.is_alive()
    skipped_s = 3600.0
    thread.join(10)
    assert not thread.is_alive()
    until = time.monotonic() + 10
    while not (left := rig.supervisor._writers) or any(w.process in victims for w in left):
        assert time.monotonic() < until
        time.sleep(0.005)
    assert "ended with status -9" in rig.reasons()["xtr-0"]
    assert "ended with status -9" in rig.reasons()["xtr-1"]
    rig.tap.take(make_batch([5], ["xtr-after"]), make_states(5))
    while "xtr-after" not in {header.rid for header, _ in rig.dumps()}:
        assert time.monotonic() < until
        time.sleep(0.005)


def test_a_job_is_spread_over_the_writers_and_fits_a_message() -> None:
    pieces = [
        SlotPiece(rid=f"xtr-{i}" * 20, start=0, begin=i, rows=1, counter=i) for i in range(1000)
    ]
    parts = _split(Job(slot=3, slot_rows=1000, pieces=pieces, weights="w"), num_parts=4)
    assert {part.weights for part in parts} == {"w"}
    assert [piece for part in parts for piece in part.pieces] == pieces
    assert all(len(part.pieces) <= MAX_PIECES and part.slot == 3 for part in parts)
    assert all(len(part.encode()) < MAX_MESSAGE_BYTES for part in parts)
    assert all(Job.decode(part.encode()) == part._replace(pieces=list(part.pieces), failures=[])
               for part in parts)  # fmt: skip
    assert len(_split(Job(slot=0, slot_rows=9, pieces=pieces[:1]), num_parts=4)) == 1


def test_a_removed_directory_is_counted_and_survived(tmp_path: Path) -> None:
    directory = tmp_path / "gone"
    directory.mkdir()
    rig = Rig(directory)
    directory.rmdir()
    for _ in range(4):
        rig.tap.take(make_batch([9]), make_states(9))
    until = time.monotonic() + 10
    while rig.stats.snapshot()["errors_lost"] < 4:
        assert time.monotonic() < until
        time.sleep(0.005)
    directory.mkdir()  # another one: nobody knows who made it
    rig.tap.take(make_batch([9]), make_states(9))
    while rig.stats.snapshot()["errors_lost"] < 5:
        assert time.monotonic() < until
        time.sleep(0.005)
    assert os.listdir(directory) == []


def test_counters_are_shown_in_a_file(rig: Rig) -> None:
    rig.tap.take(make_batch([9, 2], ["xtr-a", "other"]), make_states(11))
    until = time.monotonic() + 10
    shown: dict[str, Any] = {}
    while shown.get("pieces") != 1:
        assert time.monotonic() < until
        time.sleep(0.05)
        path = rig.directory / STATS_NAME
        if path.exists():
            shown = json.loads(path.read_bytes())
    assert (shown["forwards"], shown["rows"], shown["foreign_requests"]) == (1, 9, 1)
    assert shown["dump_bytes"] == (rig.directory / "0000000000.safetensors").stat().st_size


@pytest.fixture
def request_lines() -> Iterator[Callable[[str | None], None]]:
    yield request_log.set_level
    request_log.set_level(None)


def wait_for_reports(rig: Rig, **counters: int) -> None:
    until = time.monotonic() + 10
    while any(rig.stats.snapshot()[name] < value for name, value in counters.items()):
        assert time.monotonic() < until, rig.stats.snapshot()
        time.sleep(0.005)


def test_a_request_is_followed_by_its_rid(
    tmp_path: Path,
    request_lines: Callable[[str | None], None],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    request_lines("DEBUG")
    rig = Rig(tmp_path, log_level="DEBUG")
    rig.tap.take(make_batch([4], ["other"]), make_states(4))
    rig.tap.take(make_batch([7, 5], ["xtr-a", "xtr-b"], prefix_lens=[0, 32]), make_states(12))
    wait_for_reports(rig, pieces=2)
    assert [record.getMessage() for record in caplog.records] == [
        "hidden states: rid=xtr-a captured: forward 2, rows 7, start 0",
        "hidden states: rid=xtr-b captured: forward 2, rows 5, start 32",
    ]
    lines = [line.partition("] ")[2] for line in capfd.readouterr().err.splitlines()]
    assert lines == [
        "hidden states: rid=xtr-a written: dump 0, rows 7, start 0",
        "hidden states: rid=xtr-b written: dump 1, rows 5, start 32",
    ]


@pytest.mark.parametrize("level", ["DEBUG", "WARNING"])
def test_an_error_of_a_request_is_a_warning_with_its_rid(
    level: str,
    tmp_path: Path,
    request_lines: Callable[[str | None], None],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    request_lines(level)
    directory = tmp_path / "gone"
    directory.mkdir()
    rig = Rig(directory, log_level=level)
    rig.tap.refuse(["xtr-refused", "other"], "for a reason")
    wait_for_reports(rig, errors=1)
    rig.wait(errors=1)
    shutil.rmtree(directory)
    rig.tap.take(make_batch([9], ["xtr-unwritten"]), make_states(9))
    wait_for_reports(rig, errors_lost=1)
    refused, unwritten = [
        line.partition("] ")[2] for line in capfd.readouterr().err.splitlines() if "failed" in line
    ]
    assert refused == (
        "hidden states: rid=xtr-refused failed: error record 0, start 0: for a reason"
    )
    assert unwritten.startswith(
        "hidden states: rid=xtr-unwritten failed: error record 1, start 0: writing failed: "
    )
    assert "writing the error record failed: FileNotFoundError" in unwritten


def test_a_dead_writers_requests_are_logged_by_the_scheduler(
    tmp_path: Path,
    request_lines: Callable[[str | None], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    request_lines("WARNING")
    rig = Rig(tmp_path)
    for writer in rig.supervisor._writers:
        writer.process.send_signal(signal.SIGSTOP)
    rig.tap.take(make_batch([5], ["xtr-a"]), make_states(5))
    until = time.monotonic() + 10
    while not any(writer.given for writer in rig.supervisor._writers):
        assert time.monotonic() < until
        time.sleep(0.005)
    for writer in rig.supervisor._writers:
        writer.process.kill()
    rig.wait(errors=1)
    wait_for_reports(rig, errors=1)
    (line,) = [r.getMessage() for r in caplog.records if "rid=xtr-a" in r.getMessage()]
    assert line == (
        "hidden states: rid=xtr-a failed: error record 0, start 0: "
        "the writer process ended with status -9"
    )


def test_without_a_log_level_no_request_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    rig = Rig(tmp_path)
    rig.tap.take(make_batch([7], ["xtr-a"]), make_states(7))
    rig.tap.refuse(["xtr-b"], "for a reason")
    wait_for_reports(rig, pieces=1, errors=1)
    # Supervisors of other tests may still log that a writer ended.
    assert [text for text in caplog.messages if "rid=" in text] == []
    assert capfd.readouterr().err == ""


class TestWriteWhole:
    def test_short_writes_are_continued(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = os.writev

        def short(descriptor: int, buffers: list[memoryview]) -> int:
            return real(descriptor, [buffers[0][:3]])

        monkeypatch.setattr(os, "writev", short)
        parts: list[bytes | memoryview] = [b"header--", memoryview(b"0123456789"), b"", b"end"]
        assert Directory.open(tmp_path).write_whole("x", parts, mode=0o600) == 21
        assert (tmp_path / "x").read_bytes() == b"header--0123456789end"

    def test_a_real_full_device(self, tmp_path: Path) -> None:
        with open("/dev/full", "wb", buffering=0) as full, pytest.raises(OSError, match="space"):
            directories._write_all(full.fileno(), [b"a"])

    def test_the_mode_is_exact_whatever_the_umask(self, tmp_path: Path) -> None:
        before = os.umask(0o077)
        try:
            Directory.open(tmp_path).write_whole("x", [b"a"], mode=0o664)
        finally:
            os.umask(before)
        assert (tmp_path / "x").stat().st_mode & 0o777 == 0o664

    def test_a_file_that_exists_is_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "x").write_bytes(b"old")
        Directory.open(tmp_path).write_whole("x", [b"new"], mode=0o600)
        assert os.listdir(tmp_path) == ["x"]
        assert (tmp_path / "x").read_bytes() == b"new"


class TestPlanRing:
    def test_four_whole_forwards_by_default(self) -> None:
        plan = plan_ring(
            layout=LAYOUT, forward_rows=100, num_slots=4, total_bytes=None, pinned=False
        )
        assert (plan.num_slots, plan.slot_rows) == (4, 100)
        assert plan.slot_bytes >= LAYOUT.size_bytes(100)

    def test_the_cap_makes_slots_smaller_not_fewer(self) -> None:
        big = SlotLayout(dataclasses.replace(STATES, hidden_size=7168, dtype="BF16"))
        plan = plan_ring(layout=big, forward_rows=65536, num_slots=4, total_bytes=None, pinned=True)
        assert plan.total_bytes == 4 << 30
        assert plan.num_slots == 4
        assert plan.slot_rows < 65536
        assert big.size_bytes(plan.slot_rows) <= plan.slot_bytes

    def test_a_ring_too_small_for_a_row_is_refused(self) -> None:
        big = SlotLayout(dataclasses.replace(STATES, hidden_size=1 << 16))
        with pytest.raises(RingError, match="SGLANG_HS_RING_BYTES"):
            plan_ring(layout=big, forward_rows=8192, num_slots=4, total_bytes=1 << 20, pinned=False)

    @given(
        st.integers(1, 500), st.integers(2, 8), st.one_of(st.none(), st.integers(1 << 16, 1 << 22))
    )
    def test_slots_fit_in_the_whole(self, rows: int, slots: int, total: int | None) -> None:
        plan = plan_ring(
            layout=LAYOUT, forward_rows=rows, num_slots=slots, total_bytes=total, pinned=False
        )
        assert plan.num_slots >= slots or total is not None
        assert plan.num_slots * plan.slot_bytes <= plan.total_bytes
        assert plan.slot_bytes % 256 == 0
        assert 1 <= plan.slot_rows <= rows
        assert LAYOUT.size_bytes(plan.slot_rows) <= plan.slot_bytes


@given(st.integers(1, 30), st.data())
def test_gathered_rows_lie_where_the_layout_says(rows: int, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, rows - 1))
    end = data.draw(st.integers(begin + 1, rows))
    flat = torch.zeros(LAYOUT.size_bytes(end - begin), dtype=torch.uint8)
    states = make_states(rows)
    gather(states, LAYOUT, flat, begin=begin, end=end)
    for section in LAYOUT.sections(end - begin):
        run = flat[section.offset : section.offset + (end - begin) * section.row_bytes]
        dtype = torch.int32 if section.dtype == "I32" else torch.float32
        got = run.view(dtype).view(end - begin, section.width)
        if section.name == "aux":
            assert torch.equal(got, torch.cat(states.aux, dim=-1)[begin:end])
        elif section.name == "input_ids":
            assert got[:, 0].tolist() == list(range(begin, end))
        else:
            assert torch.equal(got, getattr(states, section.name)[begin:end])

"""Finding dumps, and tying them to the requests that wait for them."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from helpers import dumps_under, make_ready, read_header

import extractor.dumps.dump_reader
from extractor.core.errors import PluginError
from extractor.core.failure import Failure
from extractor.core.timings import CollectTimings, ListingTimings
from extractor.dumps.collector import Collector
from extractor.dumps.dump_reader import Arrival, BrokenFile, DumpFile, DumpWatcher, ErrorFile, Rank
from extractor.testing.fake_server import FakeServer
from extractor.testing.faults import Fault
from manifest.states import Reason
from server_patch.directory import Directory, UnsafeFile
from server_patch.dump_format import ErrorRecord, encode_error

RID = "xtr-run-session-0-1"


@pytest.fixture
async def server(dump_root: Path) -> AsyncIterator[FakeServer]:
    async with FakeServer(dump_root, chunk_tokens=4).running() as server:
        yield server


@pytest.fixture
def rank(server: FakeServer) -> Rank:
    return Rank(
        directory=Directory.open(server.directory),
        ready=make_ready(boot_id=server.boot_id, weights=server.model.weights),
    )


@pytest.fixture
def collector(rank: Rank) -> Collector:
    return Collector([rank], rid_prefix="xtr-run-")


def dump_paths(server: FakeServer) -> list[Path]:
    return list(server.directory.glob("*.safetensors"))


def ids(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int32)


# --- watcher ----------------------------------------------------------------------------------


async def test_each_file_is_reported_once_and_temporary_ones_never(
    server: FakeServer, rank: Rank
) -> None:
    watcher = DumpWatcher([rank])
    assert watcher.poll() == []
    (server.directory / ".tmp-0000000099.safetensors").write_bytes(b"half")
    (server.directory / "note.txt").write_bytes(b"")
    server.dump(RID, ids(10))
    arrived = [arrival for _, arrival in watcher.poll()]
    assert all(isinstance(arrival, DumpFile) for arrival in arrived)
    assert len(arrived) == 3
    assert watcher.poll() == []
    server.dump(RID, ids(3))
    assert len(watcher.poll()) == 1


def content_of(arrival: Arrival) -> bytes | None:
    assert isinstance(arrival, DumpFile)
    return arrival.content


async def test_only_small_files_are_kept_in_memory_with_their_headers(
    server: FakeServer, rank: Rank
) -> None:
    server.dump(RID, ids(6))  # pieces of 4 rows and 2
    sizes = sorted(path.stat().st_size for path in dump_paths(server))
    arrived = [arrival for _, arrival in DumpWatcher([rank], whole_bytes=sizes[0]).poll()]
    small, large = sorted(arrived, key=lambda arrival: arrival.path.stat().st_size)
    assert content_of(small) == small.path.read_bytes()
    assert content_of(large) is None
    assert [content_of(arrival) for _, arrival in DumpWatcher([rank]).poll()] == [None, None]


async def test_files_of_other_runs_are_not_reported_and_not_opened_again(
    server: FakeServer, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.dump("xtr-other-session-0-1", ids(3))
    server.dump("xtr-other-session-1-1", ids(3), Fault.ERROR_RECORD)
    server.dump("nobody's", ids(3))
    server.dump(RID, ids(3))
    assert len(DumpWatcher([rank], rid_prefix="xtr-run-").poll()) == 1
    assert sorted(rank.others.values(), key=str) == [None, "other", "other"]
    monkeypatch.setattr(
        extractor.dumps.dump_reader, "_read", lambda _, name, whole_bytes: opened.append(name)
    )
    opened: list[str] = []
    DumpWatcher([rank], rid_prefix="xtr-run-").poll()
    DumpWatcher([rank], rid_prefix=RID).poll()
    assert opened == ["0000000003.safetensors"] * 2
    opened.clear()
    DumpWatcher([rank], rid_prefix="xtr-other-").poll()  # their own run opens them again
    assert opened == [
        "0000000000.safetensors", "0000000001.error.json", "0000000003.safetensors",
    ]  # fmt: skip


async def test_the_names_of_other_runs_files_are_bounded(server: FakeServer, rank: Rank) -> None:
    timings = CollectTimings(max_other_names=3, listing=ListingTimings(interval_s=0.0))
    watcher = DumpWatcher([rank], rid_prefix="xtr-run-", timings=timings)
    for number in range(5):
        server.dump(f"xtr-other-session-{number}-1", ids(3))
    assert watcher.poll() == []
    assert list(rank.others) == ["0000000003.safetensors", "0000000004.safetensors"]
    assert watcher.poll() == []


async def test_the_newest_files_are_opened_first_and_eventually_all(
    server: FakeServer, rank: Rank
) -> None:
    def polled(most: int) -> list[int]:
        arrivals = [arrival for _, arrival in watcher.poll(most=most)]
        return [int(arrival.path.name[:10]) for arrival in arrivals]

    watcher = DumpWatcher([rank], rid_prefix="xtr-run-")
    for _ in range(5):
        server.dump(RID, ids(3))
    assert polled(2) == [0, 1]
    server.dump(RID, ids(3))
    assert polled(2) == [5, 2]
    await watcher.wait()  # returns at once: some files are still unread
    assert polled(9) == [3, 4]
    assert polled(9) == []
    watcher.report_again()
    assert polled(9) == [0, 1, 2, 3, 4, 5]


async def test_a_skipping_watcher_never_opens_existing_files(
    server: FakeServer, rank: Rank
) -> None:
    server.dump(RID, ids(3))
    collector = Collector([rank], rid_prefix=RID, is_skipping=True)
    waiting = collector.expect(RID, num_tokens=3)
    collector.poll()
    assert not waiting.done()
    server.dump(RID, ids(3))
    collector.poll()
    assert waiting.done()
    collector.drop(RID, waiting)
    server.dump(RID, ids(3))
    collector.sweep()
    assert [path.name for path in dump_paths(server)] == ["0000000000.safetensors"]


async def test_unreadable_files_and_error_records_are_told_apart(
    server: FakeServer, rank: Rank
) -> None:
    record = ErrorRecord(rid=RID, start=0, reason="full")
    (server.directory / "0000000090.error.json").write_bytes(encode_error(record))
    (server.directory / "0000000091.safetensors").write_bytes(b"torn")
    (server.directory / "0000000092.error.json").write_bytes(b"[]")
    arrived = [arrival for _, arrival in DumpWatcher([rank]).poll()]
    assert [type(arrival) for arrival in arrived] == [ErrorFile, BrokenFile, BrokenFile]


async def test_what_is_no_regular_file_is_nobodys_dump(server: FakeServer, rank: Rank) -> None:
    """A pipe must not be waited for, a link not be followed."""
    directory = server.directory
    os.mkfifo(directory / "0000000090.safetensors")
    os.mkfifo(directory / "0000000091.error.json")
    (directory / "0000000092.safetensors").mkdir()
    server.dump(RID, ids(3))
    (real,) = (path for path in directory.glob("*.safetensors") if path.is_file())
    (directory / "0000000093.safetensors").symlink_to(real)
    arrived = [arrival for _, arrival in DumpWatcher([rank]).poll()]
    assert [arrival.path for arrival in arrived] == [real]
    for name in ("0000000090.safetensors", "0000000092.safetensors", "0000000093.safetensors"):
        with pytest.raises(UnsafeFile, match="not a regular file"):
            read_header(directory / name)


# --- collector --------------------------------------------------------------------------------


async def test_a_request_gets_its_pieces_by_start_whatever_their_order(
    server: FakeServer, collector: Collector
) -> None:
    collected = collector.expect(RID, num_tokens=10)
    server.dump(RID, ids(10))
    collector.poll()
    pieces = collected.result()
    assert not isinstance(pieces, Failure)
    assert [(piece.start, piece.end) for piece in pieces] == [(0, 4), (4, 8), (8, 10)]
    assert len(dumps_under(server.directory)) == 3  # the taker removes them


async def test_an_incomplete_request_waits(server: FakeServer, collector: Collector) -> None:
    collected = collector.expect(RID, num_tokens=11)
    server.dump(RID, ids(10))
    collector.poll()
    assert not collected.done()
    assert collector.rows_seen(RID) == 10
    collector.drop(RID, collected)
    assert dumps_under(server.directory) == []


async def test_late_and_unexpected_dumps_of_this_run_are_removed(
    server: FakeServer, collector: Collector
) -> None:
    collected = collector.expect(RID, num_tokens=10)
    collector.drop(RID, collected)
    server.dump(RID, ids(10))
    collector.poll()
    assert collector.num_orphans == 3
    assert dumps_under(server.directory) == []


async def test_a_whole_dump_that_nobody_takes_is_removed_when_it_is_dropped(
    server: FakeServer, collector: Collector
) -> None:
    collected = collector.expect(RID, num_tokens=10)
    server.dump(RID, ids(10))
    collector.poll()
    collector.drop(RID, collected)
    assert dumps_under(server.directory) == []


async def test_other_runs_files_are_not_touched(server: FakeServer, collector: Collector) -> None:
    server.dump("xtr-other-session-0-1", ids(10))
    record = ErrorRecord(rid="xtr-other-session-1-1", start=0, reason="full")
    (server.directory / "0000000090.error.json").write_bytes(encode_error(record))
    collector.poll()
    collector.sweep()
    assert len(dumps_under(server.directory)) == 4


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault.DOUBLE_DUMP, Reason.DUMP_CORRUPT),
        (Fault.WRONG_BOUNDARIES, Reason.WRONG_LAYOUT),
        (Fault.ERROR_RECORD, Reason.DUMP_FAILED),
    ],
)
async def test_a_bad_dump_fails_its_request_and_leaves_nothing(
    server: FakeServer, collector: Collector, fault: Fault, reason: Reason
) -> None:
    collected = collector.expect(RID, num_tokens=10)
    server.dump(RID, ids(10), fault)
    collector.poll()
    outcome = collected.result()
    assert isinstance(outcome, Failure)
    assert outcome.reason is reason
    assert dumps_under(server.directory) == []


async def test_rows_past_the_end_of_the_prompt_are_a_conflict(
    server: FakeServer, collector: Collector
) -> None:
    collected = collector.expect(RID, num_tokens=7)
    server.dump(RID, ids(10))
    collector.poll()
    outcome = collected.result()
    assert isinstance(outcome, Failure)
    assert outcome.reason is Reason.DUMP_CORRUPT


async def test_torn_files_are_removed_and_counted(server: FakeServer, collector: Collector) -> None:
    collected = collector.expect(RID, num_tokens=4)
    server.dump(RID, ids(4), Fault.TORN_DUMP)
    collector.poll()
    assert not collected.done()
    assert collector.num_broken == 1
    assert dumps_under(server.directory) == []


async def test_a_sweep_removes_all_of_this_run(server: FakeServer, collector: Collector) -> None:
    whole = collector.expect(RID, num_tokens=10)
    collector.expect("xtr-run-session-1-1", num_tokens=10)
    server.dump(RID, ids(10))
    server.dump("xtr-run-session-1-1", ids(6))
    collector.poll()
    assert whole.done()
    collector.sweep()
    assert dumps_under(server.directory) == []


async def test_a_directory_that_is_gone_is_told(server: FakeServer, collector: Collector) -> None:
    shutil.rmtree(server.directory)
    with pytest.raises(PluginError, match="is gone"):
        collector.poll()
    running = asyncio.create_task(collector.run())
    with pytest.raises(PluginError):
        await running


async def test_a_rid_is_expected_once(collector: Collector) -> None:
    collector.expect(RID, num_tokens=1)
    with pytest.raises(ValueError, match="expected already"):
        collector.expect(RID, num_tokens=1)

"""DirectoryWatch: every name once, whether the kernel tells of it or a listing finds it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from inotify_simple import flags

from extractor.core.timings import ListingTimings
from extractor.system import inotify
from extractor.system.inotify import DirectoryWatch
from server_patch.directory import Directory


@pytest.fixture(params=["told", "listed"])
def is_told(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Also as it is for a user without a free inotify instance."""

    def no_instance() -> None:
        raise OSError(24, "Too many open files")

    is_told = bool(request.param == "told")
    if not is_told:
        monkeypatch.setattr(inotify, "INotify", no_instance)
    return is_told


#: Nothing is listed a second time while a test runs, unless it says that time passed.
RARELY = ListingTimings(interval_s=3600.0)


class Watch(DirectoryWatch):
    """Of directories by their paths."""

    def poll(self) -> list[tuple[Path, str]]:  # type: ignore[override]
        return [(directory.path, name) for directory, name in super().poll()]


def watch(*paths: Path, timings: ListingTimings = RARELY) -> Watch:
    return Watch(
        [Directory.open(path) for path in paths],
        is_wanted=lambda name: name.endswith(".dump"),
        timings=timings,
    )


def publish(directory: Path, name: str) -> None:
    temporary = directory / f".tmp-{name}"
    temporary.write_bytes(b"x")
    temporary.rename(directory / name)


def test_each_name_is_reported_once(tmp_path: Path, is_told: bool) -> None:
    publish(tmp_path, "1.dump")
    watcher = watch(tmp_path)
    publish(tmp_path, "2.dump")  # between the watch and the first look: listed and told
    assert watcher.poll() == [(tmp_path, "1.dump"), (tmp_path, "2.dump")]
    assert watcher.poll() == []
    publish(tmp_path, "3.dump")
    publish(tmp_path, "3.other")
    assert watcher.poll() == [(tmp_path, "3.dump")]
    assert watcher.poll() == []


def test_a_name_that_went_away_again_is_not_reported(tmp_path: Path, is_told: bool) -> None:
    watcher = watch(tmp_path)
    assert watcher.poll() == []
    publish(tmp_path, "1.dump")
    (tmp_path / "1.dump").unlink()
    assert watcher.poll() == []


def test_what_is_no_regular_file_is_not_reported(tmp_path: Path, is_told: bool) -> None:
    watcher = watch(tmp_path)
    assert watcher.poll() == []
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "pipe").rename(tmp_path / "1.dump")
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory").rename(tmp_path / "2.dump")
    assert watcher.poll() == []


def test_directories_are_told_apart(tmp_path: Path, is_told: bool) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    watcher = watch(first, second)
    assert watcher.poll() == []
    publish(second, "1.dump")
    publish(first, "1.dump")
    assert watcher.poll() == [(first, "1.dump"), (second, "1.dump")]


def test_a_directory_that_is_removed_is_missed_at_once(tmp_path: Path, is_told: bool) -> None:
    directory = tmp_path / "a"
    directory.mkdir()
    watcher = watch(directory)
    assert watcher.poll() == []
    directory.rmdir()
    with pytest.raises(FileNotFoundError):
        watcher.poll()


def test_what_the_kernel_does_not_tell_is_listed_later(tmp_path: Path) -> None:
    watcher = watch(tmp_path)
    assert watcher.poll() == []
    (tmp_path / "1.dump").write_bytes(b"written in place")
    assert watcher.poll() == []
    watcher._listed_at -= RARELY.interval_s
    assert watcher.poll() == [(tmp_path, "1.dump")]
    assert watcher.poll() == []


def test_a_listing_that_takes_long_is_made_less_often(tmp_path: Path) -> None:
    timings = ListingTimings(interval_s=1e-9)
    watcher = watch(tmp_path, timings=timings)
    assert watcher.poll() == []
    (tmp_path / "1.dump").write_bytes(b"written in place")
    watcher._listing_s = 1e12 * timings.cost_s
    assert watcher.poll() == []
    publish(tmp_path, "2.dump")
    assert watcher.poll() == [(tmp_path, "2.dump")]  # reported by inotify
    watcher._listing_s = 0.0
    assert watcher.poll() == [(tmp_path, "1.dump")]


async def test_without_inotify_listings_take_a_limited_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher := watch(tmp_path), "_notify", None)
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    for watcher._listing_s in (0.0, 0.5):
        await watcher.wait()
    assert pauses == [RARELY.idle_pause_s, 0.5 * RARELY.pauses]


def test_report_again_repeats_all_names_except_skipped_ones(tmp_path: Path, is_told: bool) -> None:
    publish(tmp_path, "1.dump")
    watcher = watch(tmp_path)
    watcher.skip()
    publish(tmp_path, "2.dump")
    for _ in range(2):
        assert watcher.poll() == [(tmp_path, "2.dump")]
        assert watcher.poll() == []
        watcher.report_again()


def test_names_lost_in_an_overflow_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher = watch(tmp_path)
    assert watcher.poll() == []
    publish(tmp_path, "1.dump")

    class Overflowed:
        mask = flags.Q_OVERFLOW

    assert watcher._notify is not None
    monkeypatch.setattr(watcher._notify, "read", lambda timeout: [Overflowed()])
    assert watcher.poll() == [(tmp_path, "1.dump")]
    assert watcher.poll() == []


async def test_waiting_ends_with_a_new_name(tmp_path: Path, is_told: bool) -> None:
    watcher = watch(tmp_path)
    assert watcher.poll() == []

    async def arrival() -> list[tuple[Path, str]]:
        while not (found := watcher.poll()):
            await watcher.wait()
        return found

    waiting = asyncio.create_task(arrival())
    await asyncio.sleep(0)
    publish(tmp_path, "1.dump")
    assert await waiting == [(tmp_path, "1.dump")]

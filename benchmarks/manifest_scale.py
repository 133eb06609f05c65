"""Measures a whole run's changes, resume and status on a manifest of many rows.

    python -m benchmarks.manifest_scale --rows 10000000 --directory /some/disk

Plans every row and stores or fails it some rows later, leaves a few in flight as a kill would, and
then measures what a new process does first. Nothing here is the model's work: the
figures are the client's own bound.

    python -m benchmarks.manifest_scale --rows 20000 --busy 200

Instead, the manifest's thread beside an event loop as busy as a client's: 128 samples in flight,
on each of which the loop computes for 200 microseconds in Python, holding the GIL. Rounds with
the manifest and with none are interleaved.
"""

from __future__ import annotations

import asyncio
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Protocol, TypeVar

from benchmarks.command import command_parser, directory, number_from, run_command
from extractor.core.humanize import amount, table
from manifest.records import (
    Change,
    Failed,
    Planned,
    PromptFacts,
    Shard,
    Source,
    SourceRow,
    Stored,
    StoredSample,
)
from manifest.states import Reason
from manifest.store import Store
from manifest.writer_thread import Commits, StoreOwner

BATCH = 500  # changes of one commit
SAMPLES_PER_SHARD = 20_000
SAMPLE_BYTES = 100_000
NUM_LEFT = 128  # in flight when the process was killed
FAILED_EVERY = 1000
GROUP = 17  # samples of one commit of a small run

Result = TypeVar("Result")


def timed(function: Callable[[], Result]) -> tuple[Result, float]:
    began = time.perf_counter()
    result = function()
    return result, time.perf_counter() - began


def memory() -> int:
    """Most bytes this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def key_of(n: int) -> str:
    """As scattered as a digest."""
    return f"{n * 0x9E3779B97F4A7C15F39CC0605CEDC835 % 2**128:032x}"


def planned(n: int) -> Planned:
    return Planned(
        origin=SourceRow(ordinal=n, source=0, line=n + 1),
        prompt=PromptFacts(key=key_of(n), num_tokens=2048, num_trained=1000),
    )


def stored(n: int) -> Stored:
    shard, place = divmod(n, SAMPLES_PER_SHARD)
    sample = StoredSample(
        shard=shard, offset=4096 + place * SAMPLE_BYTES, size_bytes=SAMPLE_BYTES,
        digest="0" * 32, num_pieces=1,
    )  # fmt: skip
    return Stored(ordinal=n, sample=sample, attempts=1)


def life(rows: int) -> Iterator[Change]:
    """The changes that a run posts, with NUM_LEFT rows in flight."""
    for newest in range(rows):
        yield planned(newest)
        n = newest - NUM_LEFT
        if n < 0:
            continue
        if n % FAILED_EVERY == 0:
            yield Failed(ordinal=n, reason=Reason.NONFINITE, detail="", attempts=1)
        else:
            yield stored(n)


def begin(store: Store, rows: int) -> None:
    store.begin(
        {"model": "m"}, [Source(number=0, path="p", size_bytes=1, digest="d", num_rows=rows)]
    )
    for number in range(rows // SAMPLES_PER_SHARD + 1):
        store.add_shard(
            Shard(number=number, data_start=4096, is_sealed=False, size_bytes=4096, num_samples=0)
        )


def apply(store: Store, changes: Iterator[Change]) -> None:
    while batch := list(islice(changes, BATCH)):
        store.apply(batch)


def measure(path: Path, rows: int) -> list[tuple[str, str]]:
    store = Store.create_or_open(path)
    begin(store, rows)
    before = processor_s()
    _, living_s = timed(lambda: apply(store, life(rows)))
    core_s = processor_s() - before
    after_life = memory()
    store.close()

    def resume() -> tuple[Store, int]:
        store = Store.create_or_open(path)
        store.shards()
        settled = sum(end - begin for begin, end in store.settled_ranges())
        store.attempts(), store.suspects()
        return store, settled

    (store, settled), resuming_s = timed(resume)
    assert settled == rows - NUM_LEFT
    store.close()

    def status() -> int:
        reader = Store.open_read_only(path)
        totals, _ = reader.totals(), list(islice(reader.failed_rows(), 20))
        reader.close()
        return totals.num_rows

    found, status_s = timed(status)
    assert found == rows
    store = Store.open_read_only(path)
    _, duplicates_s = timed(store.count_duplicates)
    problems, checking_s = timed(store.integrity_problems)
    assert problems == []
    store.close()
    return [
        ("rows", f"{rows:,}"),
        ("planned and stored", f"{rows / living_s:,.0f} rows/s"),
        ("processor time of a row", f"{1e6 * core_s / rows:,.1f} µs"),
        ("time to resume", f"{1e3 * resuming_s:,.1f} ms"),
        ("time of status", f"{1e3 * status_s:,.1f} ms"),
        ("counting duplicates (verify, end of run)", f"{duplicates_s:,.1f} s"),
        ("integrity check (verify)", f"{checking_s:,.1f} s"),
        ("manifest", amount(path.stat().st_size)),
        ("memory at the end of the run, at the end",
         f"{amount(after_life)}, {amount(memory())}"),
    ]  # fmt: skip


class Owner(Protocol):
    """What of StoreOwner a run's tasks use."""

    def post(self, *changes: Change) -> None: ...
    async def commit(self, *changes: Change) -> None: ...


class NoOwner:
    """Keeps nothing: what the event loop does without a manifest."""

    def post(self, *changes: Change) -> None:
        pass

    async def commit(self, *changes: Change) -> None:
        await asyncio.sleep(0)


def loops_taking(seconds: float) -> int:
    """How many turns of `compute` take so long, with nothing beside it."""
    turns = 1_000_000
    best = min(timed(lambda: compute(turns))[1] for _ in range(5))
    return round(turns * seconds / best)


def compute(turns: int) -> None:
    for _ in range(turns):
        pass


async def samples_in_flight(owner: Owner, rows: int, turns: int) -> None:
    """A run's tasks as far as the manifest sees them; one mover that stores what there is."""
    places = asyncio.Semaphore(NUM_LEFT)
    verified: asyncio.Queue[int] = asyncio.Queue()

    async def live(n: int) -> None:
        owner.post(planned(n))
        compute(turns // 2)
        await asyncio.sleep(0)
        compute(turns // 2)
        verified.put_nowait(n)

    async def move() -> None:
        left = rows
        while left:
            group = [await verified.get()]
            while not verified.empty():
                group.append(verified.get_nowait())
            await owner.commit(*map(stored, group))
            for _ in group:
                places.release()
            left -= len(group)

    async with asyncio.TaskGroup() as work:
        work.create_task(move())
        for n in range(rows):
            await places.acquire()
            work.create_task(live(n))
            await asyncio.sleep(0)  # one a turn of the loop, as replies come in


def processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@dataclass(frozen=True, kw_only=True)
class BusyRound:
    """Samples through an event loop that computes for each."""

    seconds: float
    core_s: float  # processor time of all threads
    commits: Commits


def run_busy(path: Path | None, rows: int, turns: int) -> BusyRound:
    """path: of the manifest; None without one."""

    async def run() -> BusyRound:
        owner: Owner = NoOwner()
        commits = Commits()
        if path is not None:
            owner = store_owner = await StoreOwner.open(path)
            commits = store_owner.commits
            await store_owner.call(lambda store: begin(store, rows))
        began, used = time.perf_counter(), processor_s()
        await samples_in_flight(owner, rows, turns)
        round = BusyRound(
            seconds=time.perf_counter() - began, core_s=processor_s() - used, commits=commits
        )
        if path is not None:
            await store_owner.close()
        return round

    return asyncio.run(run())


def commit_times(path: Path, rows: int, *, is_busy: bool) -> float:
    """Median seconds of a commit that plans some rows and stores those before them, in a thread;
    `is_busy`: while the main thread does nothing but compute."""
    seconds: list[float] = []

    def work() -> None:
        store = Store.create_or_open(path)
        begin(store, rows)
        for start in range(0, rows, GROUP):
            changes: list[Change] = []
            changes += map(planned, range(start, min(start + GROUP, rows)))
            changes += map(stored, range(max(0, start - GROUP), start))
            seconds.append(timed(partial(store.apply, changes))[1])
        store.close()

    thread = threading.Thread(target=work)
    thread.start()
    while is_busy and thread.is_alive():
        compute(1000)
    thread.join()
    return statistics.median(seconds)


def measure_busy(directory: Path, rows: int, busy_s: float, rounds: int) -> list[tuple[str, str]]:
    turns = loops_taking(busy_s)
    pairs = [
        (run_busy(None, rows, turns), run_busy(directory / f"{number}.sqlite", rows, turns))
        for number in range(rounds)
    ]
    ratios = [without.seconds / with_it.seconds for without, with_it in pairs]
    costs = [(with_it.core_s - without.core_s) / rows for without, with_it in pairs]
    last = pairs[-1][1].commits
    alone_s, busy_commit_s = (
        statistics.median(
            commit_times(directory / f"{name}{number}.sqlite", 50 * GROUP, is_busy=is_busy)
            for number in range(rounds)
        )
        for name, is_busy in (("alone", False), ("busy", True))
    )
    return [
        ("samples", f"{rows:,}, {1e6 * busy_s:.0f} µs of Python each"),
        ("samples/s with the manifest",
         ", ".join(f"{rows / with_it.seconds:,.0f}" for _, with_it in pairs)),
        ("of the rate without", ", ".join(f"{ratio:.3f}" for ratio in ratios)),
        ("median", f"{statistics.median(ratios):.3f}"),
        ("processor time that a sample's manifest takes, median",
         f"{1e6 * statistics.median(costs):.0f} µs"),
        ("commits of the last round", f"{last.count:,}: {last.changes / last.count:.0f} "
         f"changes, {1e3 * last.seconds / last.count:.1f} ms each"),
        (f"a commit of {2 * GROUP} changes, and beside a thread that only computes",
         f"{1e3 * alone_s:.1f} ms, {1e3 * busy_commit_s:.1f} ms"),
    ]  # fmt: skip


def main() -> None:
    parser = command_parser(__doc__, __file__)
    parser.add_argument(
        "--rows", type=number_from(NUM_LEFT), default=10_000_000, help="of the manifest"
    )
    parser.add_argument("--directory", type=directory, help="on the disk to be measured")
    parser.add_argument(
        "--busy", type=float, metavar="MICROSECONDS", help="measure beside a loop so busy"
    )
    parser.add_argument("--rounds", type=number_from(1), default=5, help="with --busy")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as work:
        if options.busy is None:
            rows = measure(Path(work) / "manifest.sqlite", options.rows)
        else:
            rows = measure_busy(Path(work), options.rows, options.busy / 1e6, options.rounds)
        print(table(rows))


if __name__ == "__main__":
    run_command(main)

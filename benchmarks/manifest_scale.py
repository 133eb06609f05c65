"""A manifest of many rows: how long planning, a whole run's changes, resume and status take.

    python -m benchmarks.manifest_scale --rows 10000000 --directory /some/disk

Plans every row, takes most of them through to STORED, fails some, leaves a few in flight as a kill
would, and then measures what a new process does first. Nothing here is the model's work: the
figures are the client's own bound.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TypeVar

from extractor.tables import amount, table
from manifest.records import Change, Failed, Moved, Planned, Shard, Source, Stored
from manifest.states import Event, Reason
from manifest.store import Store

BATCH = 500  # changes of one commit
SAMPLES_PER_SHARD = 20_000
SAMPLE_BYTES = 100_000
NUM_LEFT = 128  # in flight when the process was killed
FAILED_EVERY = 1000

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


def plan(rows: int) -> Iterator[Change]:
    for n in range(rows):
        yield Planned(
            ordinal=n, source=0, line=n + 1, label=None, key=key_of(n), num_tokens=2048,
            num_trained=1000,
        )  # fmt: skip


def life(rows: int) -> Iterator[Change]:
    """What a run posts for every row after planning it."""
    for n in range(rows):
        yield Moved(ordinal=n, event=Event.SEND, attempts=1)
        if n >= rows - NUM_LEFT:
            continue
        if n % FAILED_EVERY == 0:
            yield Failed(ordinal=n, reason=Reason.NONFINITE, detail="", attempts=1)
            continue
        yield Moved(ordinal=n, event=Event.DUMP, attempts=1)
        yield Moved(ordinal=n, event=Event.VERIFY, attempts=1)
        shard, place = divmod(n, SAMPLES_PER_SHARD)
        yield Stored(
            ordinal=n, shard=shard, offset=4096 + place * SAMPLE_BYTES,
            size_bytes=SAMPLE_BYTES, digest="0" * 32, num_pieces=1,
        )  # fmt: skip


def apply(store: Store, changes: Iterator[Change]) -> None:
    while batch := list(islice(changes, BATCH)):
        store.apply(batch)


def measure(path: Path, rows: int) -> list[tuple[str, str]]:
    store = Store.create_or_open(path)
    store.begin(
        {"model": "m"}, [Source(number=0, path="p", size_bytes=1, digest="d", num_rows=rows)]
    )
    for number in range(rows // SAMPLES_PER_SHARD + 1):
        store.add_shard(
            Shard(number=number, name=f"shard-{number:06d}", data_start=4096, is_sealed=False,
                  size_bytes=4096, num_samples=0)
        )  # fmt: skip
    _, planning_s = timed(lambda: apply(store, plan(rows)))
    after_planning = memory()
    _, living_s = timed(lambda: apply(store, life(rows)))
    after_life = memory()
    store.close()

    def resume() -> tuple[Store, int]:
        store = Store.create_or_open(path)
        store.shards()
        settled = sum(end - begin for begin, end in store.settled_ranges())
        store.attempts(), store.suspects(), store.reopen_unfinished()
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
        ("planned", f"{rows / planning_s:,.0f} rows/s"),
        ("sent, dumped, verified, stored", f"{rows / living_s:,.0f} rows/s"),
        ("time to resume", f"{1e3 * resuming_s:,.1f} ms"),
        ("time of status", f"{1e3 * status_s:,.1f} ms"),
        ("counting duplicates (verify, end of run)", f"{duplicates_s:,.1f} s"),
        ("integrity check (verify)", f"{checking_s:,.1f} s"),
        ("manifest", amount(path.stat().st_size)),
        ("memory after planning, at the end of the run, at the end",
         f"{amount(after_planning)}, {amount(after_life)}, {amount(memory())}"),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.manifest_scale", description=__doc__
    )
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to be measured")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        print(table(measure(Path(directory) / "manifest.sqlite", options.rows)))


if __name__ == "__main__":
    main()

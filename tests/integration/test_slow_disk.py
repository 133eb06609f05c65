"""A disk slower than the server throttles it: nothing grows or stalls, everything is stored."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers import (
    LAYOUT,
    Notes,
    assert_whole,
    dumps_under,
    make_prompts,
    options_for,
    ordinals_sent,
    write_prompts,
)

from extractor.core.counters import Stage
from extractor.core.request import Limits, dump_bytes
from extractor.pipeline.run import run
from extractor.shards.writer import ShardWriter
from extractor.testing.fake_server import FakeServer

PATIENCE_S = 20.0
LENGTH = 1024  # tokens of each prompt: no smaller budget than for one of these is taken
LIMITS = Limits(max_prompt_tokens=4089, vocab_size=1000, chunk_tokens=4089)
DUMP_BYTES = dump_bytes(LENGTH, LAYOUT, LIMITS)


class Gate:
    """Lets samples through to the shard one at a time, when told to."""

    def __init__(self) -> None:
        self.is_waited_at = threading.Event()
        self._permits = threading.Semaphore(0)
        self._is_open = False

    def enter(self) -> None:
        """A copy begins: in the mover's thread."""
        if not self._is_open:
            self.is_waited_at.set()
            self._permits.acquire()

    async def let_one_through(self) -> None:
        self.is_waited_at.clear()
        self._permits.release()

    async def until_waited_at(self, running: asyncio.Task[Any]) -> None:
        await until(lambda: self.is_waited_at.is_set() or running.done(), "the next copy begins")
        if running.done():
            running.result()

    def open(self) -> None:
        self._is_open = True
        self._permits.release(1000)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate, append = Gate(), ShardWriter.append

    def slow(self: ShardWriter, *arguments: Any) -> Any:
        gate.enter()
        return append(self, *arguments)

    monkeypatch.setattr(ShardWriter, "append", slow)
    return gate


class Measuring(FakeServer):
    """Knows the most bytes and files that ever lay under its directory."""

    peak_bytes = 0

    def _publish(self, name: str, data: bytes) -> None:
        super()._publish(name, data)
        self.peak_bytes = max(self.peak_bytes, self.lying_bytes())

    def lying_bytes(self) -> int:
        return sum(
            entry.stat().st_size
            for entry in os.scandir(self.directory)
            if entry.name != "READY.json"
        )

    def sent(self) -> Sequence[int]:
        return ordinals_sent(self.requests)


def has_sent(server: Measuring, goal: int) -> Callable[[], bool]:
    return lambda: len(server.sent()) >= goal


async def until(condition: Callable[[], bool], what: str) -> None:
    """Neither the server nor the run tells when something has come."""
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up, f"waited in vain until {what}"
        await asyncio.sleep(0.001)


@asynccontextmanager
async def opened_at_last(gate: Gate) -> AsyncIterator[None]:
    """Whatever happens in the block, the mover's thread comes to its end."""
    try:
        yield
    finally:
        gate.open()


@pytest.mark.parametrize("fits", [1, 3, 6])
async def test_requests_follow_the_disk_and_dumps_stay_within_the_budget(
    tmp_path: Path, dump_root: Path, gate: Gate, fits: int
) -> None:
    """`fits` dumps have room; 16 requests might be in flight."""
    num_prompts = 24
    prompts = make_prompts(num_prompts, shortest=LENGTH, longest=LENGTH)
    budget = fits * DUMP_BYTES
    notes = Notes()
    async with Measuring(dump_root).running() as server, opened_at_last(gate):
        options = options_for(
            server,
            write_prompts(tmp_path / "p.jsonl", prompts),
            tmp_path / "out",
            shm_budget_bytes=budget,
            concurrency=16,
        )
        running = asyncio.create_task(run(options, notes))
        for num_copied in range(num_prompts):
            await gate.until_waited_at(running)
            # Samples become durable in groups. None takes more than half of the room, so that the
            # server has the other half to fill while the disk is at work: neither waits for the
            # other in turn.
            goal = min(num_prompts, num_copied + fits - fits // 2)
            await until(has_sent(server, goal), f"{goal} prompts are sent with {num_copied} copied")
            assert len(server.sent()) <= num_copied + fits
            assert server.lying_bytes() <= budget
            await gate.let_one_through()
        summary = await running
        assert server.peak_bytes <= budget
        assert server.peak_concurrency <= fits
    assert sorted(server.sent()) == list(range(num_prompts))  # none was sent twice
    assert summary.counters.rows.stored == num_prompts
    assert summary.counters.now.peak_shm_bytes <= budget
    assert summary.counters.stages[Stage.RESIDENCY].count == num_prompts
    assert dumps_under(dump_root) == []
    assert_whole(tmp_path / "out", prompts)


async def test_a_disk_that_stands_still_stops_the_server_with_the_room_filled(
    tmp_path: Path, dump_root: Path, gate: Gate
) -> None:
    prompts = make_prompts(12, shortest=LENGTH, longest=LENGTH)
    async with Measuring(dump_root).running() as server, opened_at_last(gate):
        options = options_for(
            server,
            write_prompts(tmp_path / "p.jsonl", prompts),
            tmp_path / "out",
            shm_budget_bytes=4 * DUMP_BYTES,
            concurrency=16,
        )
        running = asyncio.create_task(run(options, Notes()))
        await until(
            lambda: len(server.sent()) == 4 and server.num_at_work == 0, "4 dumps lie there"
        )
        assert 3 * DUMP_BYTES < server.lying_bytes() <= 4 * DUMP_BYTES
        gate.open()
        summary = await running
    assert summary.counters.rows.stored == 12
    assert_whole(tmp_path / "out", prompts)

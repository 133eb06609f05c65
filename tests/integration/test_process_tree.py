"""A server process of our own, ended with what it leaves."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from extractor.core.timings import StopTimings
from extractor.system import signals
from extractor.system.process_tree import started

# Its child maps what SGLang never removes, and a semaphore; it has to be killed.
LEAVING = """
import mmap, multiprocessing, signal, subprocess, sys

if len(sys.argv) == 2:
    subprocess.Popen([sys.executable, __file__, sys.argv[1], "child"])
    signal.pause()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(sys.argv[1], "wb+") as file:
    file.truncate(4096)
    kept = mmap.mmap(file.fileno(), 4096)
lock = multiprocessing.get_context("spawn").Lock()
print(f"/dev/shm/sem.{lock._semlock.name[1:]}", flush=True)
while True:
    signal.pause()
"""


async def test_what_a_server_has_in_shared_memory_is_removed_when_it_is_stopped(
    tmp_path: Path,
) -> None:
    script, log = tmp_path / "server.py", tmp_path / "log"
    script.write_text(LEAVING)
    loads = Path("/dev/shm", f"sglang_loads_{tmp_path.parent.name}_{tmp_path.name}.shm")
    async with started(
        [sys.executable, str(script), str(loads)],
        environment={},
        log_path=log,
        timings=StopTimings(server_s=0.2),
    ) as server:
        async with asyncio.timeout(30):
            while "\n" not in server.log_text():  # noqa: ASYNC110 - another process writes it
                await asyncio.sleep(0.01)
        semaphore = Path(server.log_text().strip())
        assert semaphore.is_file() and loads.exists()
    assert not semaphore.exists()
    assert not loads.exists()


STUBBORN = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
while True:
    signal.pause()
"""


def test_after_a_signal_a_server_gets_only_the_remaining_time_to_stop(tmp_path: Path) -> None:
    """Without the limit this test would take an hour."""
    timings = StopTimings(server_s=3600.0, kill_s=5.0, end_s=5.2)
    log = tmp_path / "log"

    async def command() -> None:
        async with started(
            [sys.executable, "-c", STUBBORN], environment={}, log_path=log, timings=timings
        ) as server:
            while "up" not in server.log_text():  # noqa: ASYNC110 - another process writes it
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            await server.wait()

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(signals.under_signals(command(), end_s=timings.end_s))

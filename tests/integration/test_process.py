"""A server process of our own, ended with what it leaves."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from extractor.system import process_tree, signals
from extractor.system.process_tree import started

# The root dies of SIGTERM at once. Its child, which was still starting, then makes and maps what
# SGLang never removes, and has to be killed.
LATE = """
import mmap, os, signal, subprocess, sys, time

if len(sys.argv) == 2:
    subprocess.Popen([sys.executable, __file__, sys.argv[1], "child"])
    print("up", flush=True)
    signal.pause()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("child up", flush=True)
parent = os.getppid()
while os.getppid() == parent:
    time.sleep(0.01)
with open(sys.argv[1], "wb+") as file:
    file.truncate(4096)
    kept = mmap.mmap(file.fileno(), 4096)
print("made", flush=True)
time.sleep(1000)
"""


async def test_what_a_starting_server_makes_while_it_is_stopped_is_removed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_tree, "STOP_PATIENCE_S", 3.0)
    script, log = tmp_path / "server.py", tmp_path / "log"
    script.write_text(LATE)
    left = Path("/dev/shm", f"sglang_loads_{tmp_path.parent.name}_{tmp_path.name}.shm")
    command = [sys.executable, str(script), str(left)]
    async with started(command, environment={}, log_path=log) as server:
        async with asyncio.timeout(30):
            while "child up" not in server.log_text():  # noqa: ASYNC110 - another process writes it
                await asyncio.sleep(0.01)
    assert "made" in log.read_text()
    assert not left.exists()


STUBBORN = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
while True:
    signal.pause()
"""


def test_after_a_signal_a_server_gets_only_the_remaining_time_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the limit this test would take an hour."""
    monkeypatch.setattr(process_tree, "STOP_PATIENCE_S", 3600.0)
    monkeypatch.setattr(signals, "END_S", process_tree.KILL_S + 0.2)
    log = tmp_path / "log"

    async def command() -> None:
        async with started(
            [sys.executable, "-c", STUBBORN], environment={}, log_path=log
        ) as server:
            while "up" not in server.log_text():  # noqa: ASYNC110 - another process writes it
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            await server.wait()

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(signals.under_signals(command()))

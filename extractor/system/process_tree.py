"""Edge: a server process of our own: started in a group of its own, ended with all it started."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import psutil

from extractor.core.timings import DEFAULT_TIMINGS, StopTimings
from extractor.system.shared_memory import mapped_inodes, remove_files
from extractor.system.signals import patience_s, to_its_end

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class ServerProcess:
    """A running command whose output goes to a log file."""

    def __init__(
        self, process: asyncio.subprocess.Process, log_path: Path, timings: StopTimings
    ) -> None:
        self._process = process
        self._timings = timings
        self.log_path = log_path

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    def log_size(self) -> int:
        return self.log_path.stat().st_size

    def log_text(self, *, tail_bytes: int = 1 << 20) -> str:
        """The end of the log."""
        with open(self.log_path, "rb") as log:
            log.seek(max(0, self.log_size() - tail_bytes))
            return log.read().decode(errors="replace")

    def last_log_line(self) -> str:
        lines = self.log_text(tail_bytes=4096).strip().splitlines()
        return lines[-1].strip() if lines else "(empty)"

    def kill(self) -> None:
        """End the whole tree by force, at once."""
        for child in descendants(self.pid):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """End the whole tree: politely, then by force. Then remove the files in /dev/shm that it
        had mapped.

        SIGTERM goes to the root alone, so that it can stop its children in its own order.
        """
        timings = self._timings
        until = time.monotonic() + patience_s(timings.server_s, keep_s=timings.kill_s)
        children = descendants(self.pid)
        inodes = mapped_inodes([self.pid, *(child.pid for child in children)])
        with suppress(ProcessLookupError):
            self._process.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(until - time.monotonic()):
                await self._process.wait()
        left_s = max(0.0, until - time.monotonic())
        _, alive = await asyncio.to_thread(psutil.wait_procs, children, left_s)
        for child in alive:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        await asyncio.to_thread(psutil.wait_procs, alive, timings.server_s)
        # Children that were born meanwhile are still in the group.
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        await self._process.wait()
        remove_files(inodes)


@asynccontextmanager
async def started(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    log_path: Path,
    timings: StopTimings = DEFAULT_TIMINGS.stop,
) -> AsyncIterator[ServerProcess]:
    """Start `command`. The end of the block, or of this process, ends it and all that it
    started."""
    # Prompts may be in it: for this user alone, unless it is there with other permissions.
    private = partial(os.open, mode=0o600)
    with open(log_path, "wb", opener=private) as log:  # noqa: ASYNC230 - a local file, once
        process = await asyncio.create_subprocess_exec(
            *command,
            env=dict(environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    server = ServerProcess(process, log_path, timings)
    try:
        yield server
    finally:
        # A cancellation kills the server instead of waiting; either way no process is left behind.
        await to_its_end(server.stop(), hurry=server.kill)


def die_with_parent() -> None:
    """Run in a new process: SIGTERM when the thread that started it ends, also by a kill -9."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def descendants(pid: int) -> list[psutil.Process]:
    """Every process that `pid` started, directly or not, and that still runs."""
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []

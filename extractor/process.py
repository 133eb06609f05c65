"""Edge: a server process of our own: started in a group of its own, ended with all it started."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil

STOP_PATIENCE_S = 15.0
NOTE_INTERVAL_S = 0.2  # between looks at what a server that ends has in /dev/shm
LEFT_IN_SHARED_MEMORY = ("sglang_loads_*", "sem.mp-*", "sgl_shm_mq_*")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class ServerProcess:
    """A running command whose output goes to a log file."""

    def __init__(self, process: asyncio.subprocess.Process, log_path: Path) -> None:
        self._process = process
        self._inodes: set[int] = set()  # of what the tree has in /dev/shm
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

    def note_shared_memory(self) -> set[int]:
        """Remember what the tree has in /dev/shm now: once it is dead, nothing tells. All inodes
        so far."""
        pids = [self.pid, *(child.pid for child in descendants(self.pid))]
        self._inodes |= shared_memory_inodes(pids)
        return self._inodes

    def kill(self) -> None:
        """End the whole tree by force, at once."""
        for child in descendants(self.pid):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def _ended(self) -> None:
        """Wait for the root. A tree that was still starting may yet make what it will leave."""
        while self._process.returncode is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(NOTE_INTERVAL_S):
                    await self._process.wait()
            self.note_shared_memory()

    async def stop(self) -> None:
        """End the whole tree: politely, then by force; and remove what it leaves in /dev/shm.

        SIGTERM goes to the root alone, so that it can stop its children in its own order.
        """
        children = descendants(self.pid)
        self.note_shared_memory()
        with suppress(ProcessLookupError):
            self._process.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_PATIENCE_S):
                await self._ended()
        alive, until = children, time.monotonic() + STOP_PATIENCE_S
        while alive and time.monotonic() < until:
            self._inodes |= shared_memory_inodes([child.pid for child in alive])
            _, alive = await asyncio.to_thread(psutil.wait_procs, alive, NOTE_INTERVAL_S)
        for child in alive:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        await asyncio.to_thread(psutil.wait_procs, alive, STOP_PATIENCE_S)
        # Children that were born meanwhile are still in the group.
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        await self._process.wait()
        remove_shared_memory(self._inodes)


@asynccontextmanager
async def started(
    command: Sequence[str], *, environment: Mapping[str, str], log_path: Path
) -> AsyncIterator[ServerProcess]:
    """Start `command`; whatever ends the block, or us, ends it and all that it started."""
    with open(log_path, "wb") as log:  # noqa: ASYNC230 - a local file, once per server
        process = await asyncio.create_subprocess_exec(
            *command,
            env=dict(environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    server = ServerProcess(process, log_path)
    try:
        yield server
    finally:
        stopping = asyncio.create_task(server.stop(), name="server-stop")
        is_cancelled = False
        while not stopping.done():
            try:
                await asyncio.shield(stopping)
            except asyncio.CancelledError:
                # Whoever cannot wait gets it by force; but nothing is left behind.
                is_cancelled = True
                server.kill()
        await stopping
        if is_cancelled:
            raise asyncio.CancelledError


def die_with_parent() -> None:
    """Run in a new process: it gets SIGTERM when the thread that started it ends.

    Even a kill -9 of ours must not leave a server that holds the GPU.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def descendants(pid: int) -> list[psutil.Process]:
    """Every process that `pid` started, directly or not, and that still runs."""
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def shared_memory_inodes(pids: Iterable[int]) -> set[int]:
    """Inodes of the files in /dev/shm that any of the processes has mapped."""
    inodes: set[int] = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        # Columns: address, permissions, offset, device, inode, path. A semaphore's path here is
        # the name it had before its final one, so only the inode tells which file it is.
        rows = (line.split(maxsplit=5) for line in maps.splitlines())
        inodes |= {int(row[4]) for row in rows if row[-1].startswith("/dev/shm/")}
    return inodes


def left_in_shared_memory(inodes: Collection[int]) -> list[Path]:
    """Files in /dev/shm of these inodes and SGLang's names: what a stopped server leaves there.

    SGLang never removes its load snapshot, and Python's semaphores stay when the helper process
    that would remove them is killed with the rest.
    """
    found = []
    for pattern in LEFT_IN_SHARED_MEMORY:
        for path in Path("/dev/shm").glob(pattern):
            with suppress(OSError):
                if path.stat().st_ino in inodes:
                    found.append(path)
    return found


def remove_shared_memory(inodes: Collection[int]) -> None:
    """Remove what a server that has stopped left in /dev/shm."""
    for path in left_in_shared_memory(inodes):
        with suppress(OSError):
            path.unlink()

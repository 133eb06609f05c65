"""Edge: what servers of ours leave in /dev/shm.

SGLang never removes its load snapshot, and Python's semaphores stay when the helper process that
would remove them is killed with the rest. Their names tell nothing of their owner, and a server may
die a few milliseconds after it made one. But whoever uses such a file has it open or mapped from
the moment that it has its name, and the kernel knows that of every process, those of other
containers too: it grants a lease for writing on a file that nobody else holds, and on no other.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
LEFT_IN_SHARED_MEMORY = ("sglang_loads_*", "sem.mp-*", "sgl_shm_mq_*")
#: Between looks at files that somebody holds: a process that was killed lets go a little later.
PAUSES_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32)


def inodes_in_shared_memory() -> frozenset[int]:
    """Of all files with SGLang's names there, whoever's they are."""
    return frozenset(inode for inode, _ in _files())


def remove_abandoned(before: Collection[int]) -> None:
    """Remove files of ours with SGLang's names that are not among `before` and that nobody holds.

    To be called when a server has ended, with what was there before it began. Blocks for up to
    a second. Removes nothing where the kernel grants no leases.
    """
    for pause_s in (*PAUSES_S, None):
        new = [path for inode, path in _files() if inode not in before]
        are_gone = [_remove_unless_held(path) for path in new]
        if all(are_gone) or pause_s is None:
            return
        time.sleep(pause_s)


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
    """Files in /dev/shm of these inodes and SGLang's names: what a stopped server leaves there."""
    return [path for inode, path in _files() if inode in inodes]


def remove_shared_memory(inodes: Collection[int]) -> None:
    """Remove what a server that has stopped left in /dev/shm."""
    for path in left_in_shared_memory(inodes):
        with suppress(OSError):
            path.unlink()


def _files() -> list[tuple[int, Path]]:
    """Inode and path of each file with one of SGLang's names."""
    found = []
    for pattern in LEFT_IN_SHARED_MEMORY:
        for path in SHARED_MEMORY.glob(pattern):
            with suppress(OSError):
                found.append((path.stat().st_ino, path))
    return found


def _remove_unless_held(path: Path) -> bool:
    """False where a process has it open or mapped."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return True  # gone, or another user's
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            return True
        # Whoever opens it while we have the lease is made to wait until we close it, and we are
        # sent a signal: not the usual one, which would end this process.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a kernel without leases: it stays
    finally:
        os.close(descriptor)
    return True

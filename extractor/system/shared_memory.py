"""Edge: files of SGLang's in /dev/shm, and which processes have them mapped.

They stay when a process is killed. Their names do not identify the owner; /proc/PID/maps does.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
#: Names of its load snapshots, message queues and semaphores.
PATTERNS = ("sglang_loads_*", "sgl_shm_*", "sem.mp-*")


def mapped_inodes(pids: Iterable[int]) -> set[int]:
    """Inodes of the files in /dev/shm that any of the processes has mapped."""
    inodes: set[int] = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        # Columns: address, permissions, offset, device, inode, path. The path of a semaphore is the
        # temporary name that it was mapped under, so only the inode identifies the file.
        rows = (line.split(maxsplit=5) for line in maps.splitlines())
        inodes |= {int(row[4]) for row in rows if row[-1].startswith(f"{SHARED_MEMORY}/")}
    return inodes


def remove_files(inodes: Collection[int]) -> None:
    """Remove the files of SGLang's with these inodes: those of a server that has stopped."""
    for path, facts in _files():
        if facts.st_ino in inodes:
            with suppress(OSError):
                path.unlink()


def unused_files() -> dict[Path, int]:
    """Files of SGLang's and this user's that no process has mapped, each with its size in bytes.

    Processes of other containers cannot be seen, so such a file may be in use there.
    """
    files = _files()  # looked for first: what a process maps from then on is not among them
    mapped = mapped_inodes(int(entry) for entry in os.listdir("/proc") if entry.isdecimal())
    return {path: facts.st_size for path, facts in files if facts.st_ino not in mapped}


def _files() -> list[tuple[Path, os.stat_result]]:
    """Every file of this user with one of SGLang's names."""
    found = []
    for pattern in PATTERNS:
        for path in SHARED_MEMORY.glob(pattern):
            with suppress(OSError):
                facts = path.lstat()
                if facts.st_uid == os.geteuid():
                    found.append((path, facts))
    return found

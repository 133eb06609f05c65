"""Edge: files of SGLang's in /dev/shm, and which processes have them mapped.

They stay when a process is killed. Their names do not identify the owner; /proc/PID/maps does.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from server_patch.directory import Directory

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
    with Directory.open(SHARED_MEMORY) as directory:
        for name, facts in _files(directory):
            if facts.st_ino in inodes:
                with suppress(OSError):
                    directory.unlink(name)


def unused_files() -> dict[Path, int]:
    """Files of SGLang's and this user's that no process has mapped, each with its size in bytes.

    Processes of other containers cannot be seen, so such a file may be in use there.
    """
    # Looked for first: what a process maps from then on is not among them.
    with Directory.open(SHARED_MEMORY) as directory:
        files = _files(directory)
    mapped = mapped_inodes(int(entry) for entry in os.listdir("/proc") if entry.isdecimal())
    return {
        SHARED_MEMORY / name: facts.st_size for name, facts in files if facts.st_ino not in mapped
    }


def _files(directory: Directory) -> list[tuple[str, os.stat_result]]:
    """Every regular file of this user with one of SGLang's names."""
    found = []
    for name in directory.file_names():
        if any(fnmatchcase(name, pattern) for pattern in PATTERNS):
            with suppress(OSError):
                facts = directory.stat(name)
                if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid():
                    found.append((name, facts))
    return found

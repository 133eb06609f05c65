"""Writes one small file completely or not at all. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from server_patch.dump_format import TEMPORARY_PREFIX

Buffer = bytes | memoryview


def write_whole(directory: Path, name: str, parts: Sequence[Buffer], *, mode: int) -> int:
    """Write `parts` one after the other to `directory/name`; return the bytes written.

    Plain writes to a temporary name, then a rename: a reader sees the whole file or none, and a
    full file system is an error here, not a signal. No fsync: the directory is memory, and a dump
    that is lost with the machine is simply asked for again. On any error the temporary file is
    removed and OSError is raised.
    """
    temporary = directory / f"{TEMPORARY_PREFIX}{name}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        try:
            os.fchmod(descriptor, mode)  # whatever the umask took away
            size_bytes = _write_all(descriptor, parts)
        finally:
            os.close(descriptor)
        os.rename(temporary, directory / name)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    return size_bytes


def replace(directory: Path, name: str, data: bytes, *, mode: int) -> None:
    """Like `write_whole` for a file that may exist already, also from an interrupted write."""
    remove_unfinished(directory, name)
    write_whole(directory, name, [data], mode=mode)


def remove_unfinished(directory: Path, name: str) -> None:
    """Remove the temporary file of an interrupted write of `name`, if any. Raises OSError."""
    with suppress(FileNotFoundError):
        os.unlink(directory / f"{TEMPORARY_PREFIX}{name}")


def _write_all(descriptor: int, parts: Sequence[Buffer]) -> int:
    pending = [memoryview(part) for part in parts if len(part)]
    total = 0
    while pending:
        written = os.writev(descriptor, pending)
        total += written
        while pending and written >= len(pending[0]):
            written -= len(pending.pop(0))
        if written:
            pending[0] = pending[0][written:]
    return total

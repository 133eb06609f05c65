"""Plain file operations in durable order. Linux."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`. Raises OSError."""
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(descriptor, view, offset)
        offset += written
        view = view[written:]


def read_into(descriptor: int, view: memoryview, offset: int) -> None:
    """Fill `view` from `offset`. Raises EOFError when the file ends first."""
    while view:
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise EOFError(f"file ends at byte {offset}, {len(view)} more were expected")
        offset += count
        view = view[count:]


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace `path` by `data`: there is the old content or the new, never a part of it."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        write_at(descriptor, data, 0)
        os.fsync(descriptor)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    os.replace(temporary, path)
    sync_directory(path.parent)


def unlink_all(paths: Iterable[Path]) -> int:
    """Remove files; how many were there to remove."""
    removed = 0
    for path in paths:
        try:
            path.unlink()
            removed += 1
        except FileNotFoundError:
            pass
    return removed


def free_bytes(path: Path) -> int:
    """Bytes an unprivileged writer can still write on the file system that holds `path`."""
    facts = os.statvfs(path)
    return facts.f_bavail * facts.f_frsize

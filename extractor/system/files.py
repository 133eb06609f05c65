"""Plain file operations in durable order. Linux."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from extractor.core.errors import UsageError
from server_patch.directory import Directory


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`. Raises OSError."""
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(descriptor, view, offset)
        offset += written
        view = view[written:]


def open_regular(path: Path) -> int:
    """Open a regular file for reading, never a link or a waiting pipe. Raises OSError."""
    with Directory.open(path.parent) as directory:
        return directory.open_file(path.name)[0]


def is_regular(path: Path | str) -> bool:
    """Whether `path` is a regular file, not a link to one."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def read_regular(path: Path, *, max_bytes: int) -> bytes:
    """Read a regular file of at most `max_bytes`. Raises OSError, also for a larger file."""
    descriptor = open_regular(path)
    try:
        if os.fstat(descriptor).st_size > max_bytes:
            raise OSError(errno.EFBIG, f"larger than {max_bytes} bytes", str(path))
        data = bytearray()
        while len(data) <= max_bytes and (part := os.read(descriptor, max_bytes + 1)):
            data += part
        return bytes(data[:max_bytes])
    finally:
        os.close(descriptor)


def read_into(source: int | bytes, view: memoryview, offset: int) -> None:
    """Fill `view` from `offset` of a file by its descriptor, or of what was read of one. Raises
    EOFError when it ends first."""
    while view:
        if isinstance(source, int):
            count = os.preadv(source, [view], offset)
        else:
            part = source[offset : offset + len(view)]
            count = len(part)
            view[:count] = part
        if count == 0:
            raise EOFError(f"file ends at byte {offset}, {len(view)} more were expected")
        offset += count
        view = view[count:]


def blocks(
    descriptor: int, begin: int, end: int, memory: memoryview
) -> Iterator[tuple[memoryview, int]]:
    """Bytes [begin, end) of a file in parts that fit `memory`, which each overwrites; with every
    part its distance from `begin`. Raises EOFError when the file ends first."""
    for at in range(begin, end, len(memory)):
        block = memory[: min(len(memory), end - at)]
        read_into(descriptor, block, at)
        yield block, at - begin


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace `path` by `data`: there is the old content or the new, never a part of it.

    One writer at a time: a temporary file that a killed one left is taken over by the next.
    """
    temporary = path.with_name(f".{path.name}.tmp")
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


def dangling_link(path: Path) -> Path | None:
    """The first part of `path` that is a dangling link, if any. Raises OSError for a loop."""
    for part in (*reversed(path.parents), path):
        if part.is_symlink():
            try:
                part.stat()
            except FileNotFoundError:
                return part
    return None


def free_bytes(path: Path) -> int:
    """Bytes an unprivileged writer can still write on the file system that holds `path`."""
    facts = os.statvfs(path)
    return facts.f_bavail * facts.f_frsize


def file_system_type(path: Path) -> str:
    """The kernel's name of the file system of `path`, such as nfs4; empty if it is unknown."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for mount in mounts:
        # Fields: id, parent, major:minor, root, mount point, options, tags, "-", type, source ...
        before, _, behind = mount.partition(" - ")
        if before.split()[2] == wanted:
            return behind.split()[0]
    return ""


MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


def nearest_existing(path: Path) -> Path:
    """The path itself, or the nearest directory above it that exists."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def require_directory(path: Path, *, option: str) -> None:
    """Raise UsageError unless `path` is a directory or can become one. Raises OSError."""
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; name a directory with {option}")
    if (link := dangling_link(path)) is not None:
        raise UsageError(
            f"{link} is a link to {link.readlink()}, which does not exist. Make that directory "
            f"or name another {option}"
        )

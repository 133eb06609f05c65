"""What the memory limits of control groups still allow. Pure: the files' content is passed in.

Pages of a tmpfs are memory, and are charged to the group of whoever writes them. A group that
reaches its limit loses a process, whatever `df` says of the tmpfs. Limits hold for everything below
a group, so each parent's counts as well.

Version 1 and 2 are told by what the kernel says of a process:

| file | version 1 | version 2 |
|---|---|---|
| /proc/PID/cgroup | `4:memory:/a/b` | `0::/a/b` |
| limit | `memory.limit_in_bytes` | `memory.max`, and `memory.high`, from which on it throttles |
| usage | `memory.usage_in_bytes` | `memory.current` |
| of it, page cache that the kernel takes back first | `total_inactive_file` | `inactive_file` |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

#: The content of a file; None where it cannot be read.
ReadText = Callable[[PurePosixPath], str | None]

#: Version 1 writes "no limit" as the largest multiple of a page.
_NO_LIMIT_BYTES = 1 << 60


@dataclass(frozen=True, kw_only=True)
class Bound:
    """One group with a limit."""

    directory: PurePosixPath
    limit_bytes: int
    free_bytes: int  # until it is reached, page cache taken back


def memory_bounds(cgroup: str, mountinfo: str, read: ReadText) -> list[Bound] | None:
    """The groups that limit a process's memory, from its own upwards as far as can be seen.

    `cgroup`, `mountinfo`: content of /proc/PID/cgroup and of our /proc/self/mountinfo. None where
    the process's group is not among what is mounted here, as that of another container.
    """
    version, path = _memory_group(cgroup)
    top = _mount_point(mountinfo, version)
    directory = None if path is None or top is None else _directory(path, *top)
    if directory is None or top is None:
        return None
    return list(_bounds(version, directory, top[1], read))


def tightest(bounds: list[Bound]) -> Bound | None:
    """The one that is reached first."""
    return min(bounds, key=lambda bound: bound.free_bytes, default=None)


def _memory_group(cgroup: str) -> tuple[int, PurePosixPath | None]:
    paths: dict[int, PurePosixPath] = {}
    for entry in cgroup.splitlines():
        number, _, rest = entry.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            paths[1] = PurePosixPath(path)
        elif number == "0" and not controllers:
            paths[2] = PurePosixPath(path)
    # A controller belongs to one hierarchy: where version 1 has it, version 2 does not.
    version = 1 if 1 in paths else 2
    return version, paths.get(version)


def _mount_point(mountinfo: str, version: int) -> tuple[PurePosixPath, PurePosixPath] | None:
    """Which part of the hierarchy is mounted, and where."""
    for entry in mountinfo.splitlines():
        # Fields: id, parent, major:minor, root, mount point, options, tags, "-", type, source ...
        before, _, behind = entry.partition(" - ")
        fields, (kind, *others) = before.split(), behind.split() or [""]
        is_wanted = (
            kind == "cgroup2"
            if version == 2
            else kind == "cgroup" and "memory" in (others[-1] if others else "").split(",")
        )
        if is_wanted:
            return PurePosixPath(fields[3]), PurePosixPath(fields[4])
    return None


def _directory(
    path: PurePosixPath, root: PurePosixPath, mount_point: PurePosixPath
) -> PurePosixPath | None:
    if ".." in path.parts or not path.is_relative_to(root):
        return None
    return mount_point / path.relative_to(root)


def _bounds(
    version: int, directory: PurePosixPath, top: PurePosixPath, read: ReadText
) -> Iterator[Bound]:
    names = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
    usage_name = "memory.current" if version == 2 else "memory.usage_in_bytes"
    cache_name = "inactive_file" if version == 2 else "total_inactive_file"
    for group in (directory, *directory.parents):
        limits = [limit for name in names if (limit := _number(read(group / name))) is not None]
        used = _number(read(group / usage_name))
        # In version 1, a group may be told not to count what is below it.
        counts_all = group == directory or (read(group / "memory.use_hierarchy") or "1").strip()
        if limits and min(limits) < _NO_LIMIT_BYTES and used is not None and counts_all != "0":
            used -= _stat(read(group / "memory.stat") or "", cache_name)
            limit = min(limits)
            yield Bound(directory=group, limit_bytes=limit, free_bytes=max(0, limit - max(0, used)))
        if group == top:
            return


def _number(text: str | None) -> int | None:
    """A file of one number; None for one that says `max`, or is not there."""
    if text is None or not text.strip().isdigit():
        return None
    return int(text)


def _stat(text: str, name: str) -> int:
    for entry in text.splitlines():
        key, _, value = entry.partition(" ")
        if key == name:
            return int(value)
    return 0

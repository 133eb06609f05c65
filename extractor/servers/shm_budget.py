"""Edge: how much dumps may take: what the file system has free, and what memory limits allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from extractor.core.errors import SpaceError, UsageError
from extractor.core.humanize import amount
from extractor.core.request import Limits, dump_bytes
from extractor.dumps.dump_reader import Rank
from extractor.system.files import MEMORY_FILE_SYSTEMS, file_system_type, free_bytes
from extractor.system.memory_limits import Bound, memory_bounds, tightest
from extractor.system.process_id import pid_namespace


@dataclass(frozen=True, kw_only=True)
class Headroom:
    """Bytes of dumps that there is room for now, and what it is that bounds them."""

    free_bytes: int
    what: str  # for a person: whose limit this is
    is_of_file_system: bool  # else of the memory
    sure_bytes: int  # the same without the bound that is in doubt
    doubt: str | None = None  # what could not be seen; None where every bound is exact


def headroom(ranks: Sequence[Rank]) -> Headroom:
    """For the dumps of these writers, any of which may be the one that writes most of them. On a
    memory file system they count as the memory of its process."""
    return min((_headroom(rank) for rank in ranks), key=lambda room: room.free_bytes)


def _headroom(rank: Rank) -> Headroom:
    directory = rank.path
    free = free_bytes(directory)
    rooms = [(free, f"{directory} has free")]
    if file_system_type(directory) not in MEMORY_FILE_SYSTEMS:
        return Headroom(free_bytes=free, what=rooms[0][1], is_of_file_system=True, sure_bytes=free)
    available = _available_bytes(_read(PurePosixPath("/proc/meminfo")) or "")
    if available is not None:
        rooms.append((available, "this machine's memory has left"))
    sure = min(rooms)[0]
    bounds, doubt = _bounds(rank)
    if (bound := tightest(bounds)) is not None:
        what = (
            f"the memory limit of {amount(bound.limit_bytes)} of the control group "
            f"{bound.directory} leaves"
        )
        rooms.append((bound.free_bytes, what))
    least, what = min(rooms)
    return Headroom(
        free_bytes=least,
        what=what,
        is_of_file_system=(least, what) == rooms[0],
        sure_bytes=least if doubt is None else sure,
        doubt=doubt,
    )


def _bounds(rank: Rank) -> tuple[list[Bound], str | None]:
    mountinfo = _read(PurePosixPath("/proc/self/mountinfo")) or ""
    if rank.ready.process.namespace in (None, pid_namespace()):
        cgroup = _read(PurePosixPath(f"/proc/{rank.ready.process.pid}/cgroup"))
        bounds = None if cgroup is None else memory_bounds(cgroup, mountinfo, _read)
        if bounds is not None:
            return bounds, None
    own = memory_bounds(_read(PurePosixPath("/proc/self/cgroup")) or "", mountinfo, _read)
    return own or [], (
        "the server runs in a control group that cannot be seen from here; its memory limit, to "
        "which its dumps count, is taken to be ours"
    )


def _available_bytes(meminfo: str) -> int | None:
    for entry in meminfo.splitlines():
        name, _, value = entry.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _read(path: PurePosixPath) -> str | None:
    try:
        return Path(path).read_text()
    except OSError:
        return None


def shm_budget(ranks: Sequence[Rank], wanted: int | None, *, limits: Limits) -> int:
    """Bytes of dumps to allow at a time. Default: half of what there is room for now, under the
    dump root and within the memory limits that hold for the server.

    Raises UsageError for a budget that does not hold even one short prompt, SpaceError when there
    is no room for that much.
    """
    room = headroom(ranks)
    ready = ranks[0].ready
    free = room.free_bytes
    budget = free // 2 if wanted is None else wanted
    num_tokens = min(1024, limits.max_prompt_tokens)
    least = dump_bytes(num_tokens, ready.layout, limits)
    hint = (
        "In a container: --shm-size or --ipc=host. Leftovers: `extractor doctor` lists them."
        if room.is_of_file_system
        else "Free memory or raise that limit."
    )
    if wanted is not None and wanted < least:
        raise UsageError(
            f"--shm-budget {amount(wanted)} does not hold one prompt of {num_tokens:,} "
            f"tokens, which takes {amount(least)}"
        )
    if budget > room.sure_bytes:
        raise SpaceError(f"--shm-budget is {amount(budget)}, {room.what} {amount(free)}. {hint}")
    if budget < least:
        raise SpaceError(
            f"{room.what} {amount(free)}; half of it does not hold one prompt of "
            f"{num_tokens:,} tokens ({amount(least)}). {hint}"
        )
    return budget

"""Edge: what dead servers and killed commands left under the dump root.

Ownership decides, never age: a server's directory is a leftover when the very process that wrote
its READY.json (pid and start time) is gone. Anything whose owner is unknown is listed and left
alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from extractor.core.humanize import counted
from extractor.core.locations import DumpRoot
from extractor.core.rids import run_of
from extractor.dumps.discovery import read_failed, scan_writers
from extractor.dumps.dump_root import open_root, rank_directories, remove_rank
from extractor.system.process_id import process_start_ticks
from server_patch.directory import Directory
from server_patch.dump_format import READY_NAME, DumpFormatError, is_dump_name, read_beginning
from server_patch.settings import is_boot_id


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """The directory of a rank that no process is going to use."""

    path: Path
    boot_id: str
    rank: int
    what: str
    size_bytes: int
    is_removable: bool  # its owner is known to be dead


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """Dumps of one run under a live server. Nothing tells a run that goes on from a killed one."""

    directory: Path
    run_id: str
    num_dumps: int
    size_bytes: int


def find_waiting(root: DumpRoot) -> list[Waiting]:
    """The dumps under live servers, by the run that asked for them; probes' are of run `probe`."""
    waiting = []
    for rank in scan_writers(root).alive:
        sizes: dict[str, list[int]] = {}
        for name in _dumps(rank.directory):
            # A run that goes on takes its dumps away meanwhile.
            with suppress(OSError, DumpFormatError):
                dump, _ = read_beginning(rank.directory, name)
                sizes.setdefault(run_of(dump.header.rid) or "unknown", []).append(dump.size_bytes)
        waiting += [
            Waiting(
                directory=rank.path,
                run_id=run_id,
                num_dumps=len(of_run),
                size_bytes=sum(of_run),
            )
            for run_id, of_run in sorted(sizes.items())
        ]
    return waiting


def find_leftovers(root: DumpRoot) -> list[Leftover]:
    """Everything under `root` that no live process is known to need."""
    return [*_of_dead_servers(root), *_without_owner(root)]


def remove_leftovers(root: DumpRoot) -> list[Leftover]:
    """Remove the removable leftovers and return them."""
    removed = [leftover for leftover in find_leftovers(root) if leftover.is_removable]
    _remove(root, [(leftover.boot_id, leftover.rank) for leftover in removed])
    return removed


def remove_useless(root: DumpRoot) -> None:
    """Remove directories of dead servers that hold no dump: nobody can ask for anything there."""
    useless = [rank.ready for rank in scan_writers(root).dead if not _dumps(rank.directory)]
    _remove(root, [(ready.boot_id, ready.rank) for ready in useless])


def remove_boot(root: DumpRoot, boot_id: str) -> None:
    """Remove what a dead server left. Its boot id begins with `boot_id`; nobody else's does."""
    if (top := open_root(root)) is None:
        return
    for name in top.subdirectory_names():
        if name.startswith(boot_id) and is_boot_id(name):
            with suppress(OSError):
                top.remove_tree(name)


def _remove(root: DumpRoot, ranks: Sequence[tuple[str, int]]) -> None:
    if (top := open_root(root)) is None:
        return
    for boot_id, rank in ranks:
        remove_rank(top, boot_id, rank)


def _of_dead_servers(root: DumpRoot) -> Iterator[Leftover]:
    for rank in scan_writers(root).dead:
        num_dumps = len(_dumps(rank.directory))
        yield Leftover(
            path=rank.path,
            boot_id=rank.ready.boot_id,
            rank=rank.ready.rank,
            what=f"of the dead server {rank.ready.process.pid}, {counted(num_dumps, 'dump')}",
            size_bytes=_size(rank.directory),
            is_removable=True,
        )


def _without_owner(root: DumpRoot) -> Iterator[Leftover]:
    """Directories of servers that gave up, or that never got as far as to say who they are."""
    top = open_root(root)
    for boot_id, rank, directory in () if top is None else rank_directories(top):
        if isinstance(directory, OSError) or directory.exists(READY_NAME):
            continue
        pid = _failed_pid(directory)
        if pid is not None and process_start_ticks(pid) is not None:
            continue  # it serves, without capturing
        what = f"of the server {pid}, whose plugin gave up"
        if pid is None:
            what = (
                "a server is starting there, or died in its start: if none is starting, remove it "
                "by hand, as --clean removes only what is known to be dead"
            )
        yield Leftover(
            path=directory.path,
            boot_id=boot_id,
            rank=rank,
            what=what,
            size_bytes=_size(directory),
            is_removable=pid is not None,
        )


def _failed_pid(directory: Directory) -> int | None:
    try:
        record = read_failed(directory)
    except (OSError, DumpFormatError):
        return None
    return None if record is None else record.pid


def _dumps(directory: Directory) -> list[str]:
    """The names of the dumps in the directory of a rank; none where that was removed meanwhile."""
    with suppress(FileNotFoundError):
        return [name for name in directory.file_names() if is_dump_name(name)]
    return []


def _size(directory: Directory) -> int:
    """Bytes of the files in the directory of a rank."""
    total = 0
    with suppress(FileNotFoundError):
        for name in directory.file_names():
            with suppress(FileNotFoundError):
                total += directory.stat(name).st_size
    return total

"""Edge: what dead servers and killed commands left under the dump root.

Ownership decides, never age: a server's directory is a leftover when the very process that wrote
its READY.json (pid and start time) is gone. Anything whose owner is unknown is listed and left
alone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from extractor.core.humanize import counted
from extractor.core.locations import MANIFEST_NAME
from extractor.core.rids import run_of
from extractor.dumps.discovery import scan_writers
from extractor.system.process_id import process_start_ticks
from server_patch.dump_format import (
    FAILED_NAME,
    READY_NAME,
    DumpFormatError,
    is_dump_name,
    read_header,
)


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """A directory or file that no process is going to use."""

    path: Path
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


def find_waiting(root: Path) -> list[Waiting]:
    """The dumps under live servers, by the run that asked for them; probes' are of run `probe`."""
    waiting = []
    for rank in scan_writers(root).alive:
        sizes: dict[str, list[int]] = {}
        for path in _dumps(rank.directory):
            # A run that goes on takes its dumps away meanwhile.
            with suppress(OSError, DumpFormatError):
                run_id = run_of(read_header(path).header.rid)
                sizes.setdefault(run_id or "unknown", []).append(_file_size(path))
        waiting += [
            Waiting(
                directory=rank.directory,
                run_id=run_id,
                num_dumps=len(of_run),
                size_bytes=sum(of_run),
            )
            for run_id, of_run in sorted(sizes.items())
        ]
    return waiting


def find_leftovers(root: Path) -> list[Leftover]:
    """Everything under `root` that no live process is known to need."""
    return [*_of_dead_servers(root), *_without_owner(root)]


def remove_leftovers(root: Path) -> list[Leftover]:
    """Remove the removable leftovers and return them."""
    removed = [leftover for leftover in find_leftovers(root) if leftover.is_removable]
    for leftover in removed:
        _remove_rank(leftover.path)
    return removed


def remove_useless(root: Path) -> None:
    """Remove directories of dead servers that hold no dump: nobody can ask for anything there."""
    for rank in scan_writers(root).dead:
        if not _dumps(rank.directory):
            _remove_rank(rank.directory)


def _of_dead_servers(root: Path) -> Iterator[Leftover]:
    for rank in scan_writers(root).dead:
        num_dumps = len(_dumps(rank.directory))
        yield Leftover(
            path=rank.directory,
            what=f"of the dead server {rank.ready.process.pid}, {counted(num_dumps, 'dump')}",
            size_bytes=_size(rank.directory),
            is_removable=True,
        )


def _without_owner(root: Path) -> Iterator[Leftover]:
    """Directories of servers that gave up, or that never got as far as to say who they are."""
    for directory in sorted(root.glob("*/*/")):
        if (directory / READY_NAME).exists() or (directory.parent / MANIFEST_NAME).exists():
            continue  # the latter is a data set
        pid = _failed_pid(directory / FAILED_NAME)
        if pid is not None and process_start_ticks(pid) is not None:
            continue  # it serves, without capturing
        what = f"of the server {pid}, whose plugin gave up"
        if pid is None:
            what = (
                "a server is starting there, or died in its start: if none is starting, remove it "
                "by hand, as --clean removes only what is known to be dead"
            )
        yield Leftover(
            path=directory,
            what=what,
            size_bytes=_size(directory),
            is_removable=pid is not None,
        )


def _failed_pid(path: Path) -> int | None:
    try:
        return int(json.loads(path.read_bytes())["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _dumps(directory: Path) -> list[Path]:
    return [path for path in directory.glob("*") if is_dump_name(path.name)]


def _remove_rank(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    with suppress(OSError):  # another rank's directory is still beside it
        directory.parent.rmdir()


def _size(directory: Path) -> int:
    return sum(_file_size(path) for path in directory.glob("*"))


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0

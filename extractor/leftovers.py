"""Edge: what dead servers and killed commands left under the dump root and in /dev/shm.

Ownership decides, never age: a server's directory is a leftover when the very process that wrote
its READY.json (pid and start time) is gone. What cannot be told is listed and left alone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from extractor.config import MANIFEST_NAME
from extractor.files import write_whole
from extractor.plan import run_of
from extractor.shared_memory import left_in_shared_memory, remove_shared_memory
from extractor.tables import counted
from extractor.writers import is_same_process, pid_namespace, process_start_ticks, scan_writers
from server_patch.dump_format import (
    FAILED_NAME,
    READY_NAME,
    DumpFormatError,
    is_dump_name,
    read_header,
)

#: `<dump root>/.serve-<boot id>.json`: what a server of `extractor serve` has in /dev/shm.
_JOURNAL_PREFIX = ".serve-"


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """Something that nobody is going to use."""

    path: Path
    what: str
    size_bytes: int
    is_removable: bool  # its owner is known to be dead


@dataclass(frozen=True, kw_only=True)
class Journal:
    """A server that `extractor serve` started, and the inodes it has mapped in /dev/shm.

    Written while it lives: once it is dead, nothing else tells which of the files there were its.
    """

    pid: int
    pid_start_ticks: int
    pid_namespace: str
    inodes: tuple[int, ...]

    @staticmethod
    def path(root: Path, boot_id: str) -> Path:
        return root / f"{_JOURNAL_PREFIX}{boot_id}.json"

    @classmethod
    def of(cls, pid: int, inodes: Collection[int]) -> Journal | None:
        """None when the process is gone already."""
        start_ticks = process_start_ticks(pid)
        if start_ticks is None:
            return None
        return cls(
            pid=pid,
            pid_start_ticks=start_ticks,
            pid_namespace=pid_namespace(),
            inodes=tuple(sorted(inodes)),
        )

    def write(self, root: Path, boot_id: str) -> None:
        """Raises OSError."""
        write_whole(self.path(root, boot_id), json.dumps(asdict(self)).encode(), mode=0o600)

    @classmethod
    def read(cls, path: Path) -> Journal:
        """Raises OSError, ValueError."""
        try:
            document = json.loads(path.read_bytes())
            return cls(
                pid=int(document["pid"]),
                pid_start_ticks=int(document["pid_start_ticks"]),
                pid_namespace=str(document["pid_namespace"]),
                inodes=tuple(int(inode) for inode in document["inodes"]),
            )
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"unreadable: {error!r}") from error

    @property
    def is_alive(self) -> bool:
        return is_same_process(self.pid, self.pid_start_ticks, self.pid_namespace)


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
    """Everything under `root`, and in /dev/shm, that no live process is known to need."""
    return [*_of_dead_servers(root), *_without_owner(root), *_of_journals(root)]


def remove_leftovers(root: Path) -> list[Leftover]:
    """Remove what is removable; what was removed."""
    removed = []
    for leftover in find_leftovers(root):
        if not leftover.is_removable:
            continue
        if leftover.path.is_dir():
            _remove_rank(leftover.path)
        else:
            with suppress(OSError, ValueError):
                remove_shared_memory(Journal.read(leftover.path).inodes)
            leftover.path.unlink(missing_ok=True)
        removed.append(leftover)
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
            pid = _dead_starter(root, directory.parent.name)
            what = f"of the server {pid}, which died in its start"
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


def _dead_starter(root: Path, boot_id: str) -> int | None:
    """The pid of the dead server of `extractor serve` that had this boot id; None where it lives,
    or where none is known."""
    with suppress(OSError, ValueError):
        journal = Journal.read(Journal.path(root, boot_id))
        return None if journal.is_alive else journal.pid
    return None


def _of_journals(root: Path) -> Iterator[Leftover]:
    for path in sorted(root.glob(f"{_JOURNAL_PREFIX}*.json")):
        try:
            journal = Journal.read(path)
        except (OSError, ValueError) as error:
            what = f"{error}; if no server of `extractor serve` runs, remove it by hand"
            yield Leftover(path=path, what=what, size_bytes=0, is_removable=False)
            continue
        if journal.is_alive:
            continue
        files = left_in_shared_memory(journal.inodes)
        yield Leftover(
            path=path,
            what=f"of the dead server {journal.pid} in /dev/shm: {counted(len(files), 'file')}",
            size_bytes=sum(_file_size(file) for file in files),
            is_removable=True,
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

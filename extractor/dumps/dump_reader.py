"""Edge: finds what the plugin wrote under the dump root."""

from __future__ import annotations

import asyncio
import errno
import logging
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from extractor.core.rids import run_of
from extractor.core.timings import DEFAULT_TIMINGS, CollectTimings
from extractor.dumps.correlator import Piece
from extractor.system.inotify import DirectoryWatch
from server_patch.directory import Directory, UnsafeFile
from server_patch.dump_format import (
    MAX_DOCUMENT_BYTES,
    Dump,
    DumpFormatError,
    ErrorRecord,
    Ready,
    decode_error,
    is_dump_name,
    is_error_name,
    read_beginning,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One writer of a server: a data-parallel rank and the directory it dumps to."""

    directory: Directory
    ready: Ready
    #: Files of other runs: name -> run. All watchers share it, so each header is read once; a
    #: writer never reuses a name.
    others: dict[str, str | None] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @property
    def path(self) -> Path:
        return self.directory.path


@dataclass(frozen=True, slots=True)
class RankFile:
    """A file in the directory of a rank."""

    directory: Directory
    name: str

    @property
    def path(self) -> Path:
        """For messages."""
        return self.directory.path / self.name

    def age_s(self) -> float | None:
        """Seconds since the file got its name, its content or its mode, whichever came last; None
        where there is none. Raises OSError."""
        try:
            return time.time() - self.directory.stat(self.name).st_ctime
        except FileNotFoundError:
            return None

    def unlink(self) -> None:
        """Remove the file if it is still there. Raises OSError."""
        self.directory.unlink(self.name)


@dataclass(frozen=True, slots=True)
class DumpFile(RankFile):
    """A dump and the checked content of its header."""

    dump: Dump
    content: bytes | None = None  # of the whole file, where it was read at once


DumpPiece = Piece[DumpFile]


@dataclass(frozen=True, slots=True)
class BrokenFile(RankFile):
    """A file with a final name whose content is not what its name promises."""

    problem: str


@dataclass(frozen=True, slots=True)
class ErrorFile(RankFile):
    """An error record in place of a dump."""

    record: ErrorRecord


Arrival = DumpFile | ErrorFile | BrokenFile


class DumpWatcher:
    """Reports each new file of some ranks once; those that are being written have other names."""

    def __init__(
        self,
        ranks: Sequence[Rank],
        *,
        rid_prefix: str = "",
        whole_bytes: int = 0,
        is_skipping: bool = False,
        timings: CollectTimings = DEFAULT_TIMINGS.collect,
    ) -> None:
        """`rid_prefix`: report only files whose rid begins with it. `whole_bytes`: dumps up to this
        size are read whole and kept in memory with their header. `is_skipping`: never open files
        that exist now."""
        self._rid_prefix = rid_prefix
        self._run_id = run_of(rid_prefix)
        self._whole_bytes = whole_bytes
        self._ranks = {rank.directory: rank for rank in ranks}
        self._max_others = timings.max_other_names
        self._watch = DirectoryWatch(
            tuple(self._ranks), is_wanted=_is_wanted, timings=timings.listing
        )
        self._unread: deque[tuple[Rank, str]] = deque()
        if is_skipping:
            self._watch.skip()

    def poll(self, *, most: int | None = None) -> list[tuple[Rank, Arrival]]:
        """The files that appeared since the last poll. Raises OSError when a directory is gone.

        `most`: open at most this many files, the newest first; the next poll continues.
        """
        news = [
            (rank, name)
            for directory, name in self._watch.poll()
            if self._may_be_ours(rank := self._ranks[directory], name)
        ]
        self._unread.extendleft(reversed(news))
        arrivals: list[tuple[Rank, Arrival]] = []
        for _ in range(len(self._unread) if most is None else min(most, len(self._unread))):
            rank, name = self._unread.popleft()
            arrival = _read(rank.directory, name, self._whole_bytes)
            if arrival is not None and self._is_ours(rank, name, arrival):
                arrivals.append((rank, arrival))
        return arrivals

    def report_again(self) -> None:
        """Report every file again except skipped ones; from now on, read headers only."""
        self._whole_bytes = 0
        self._unread.clear()
        self._watch.report_again()

    async def wait(self) -> None:
        """Return when there may be something to poll."""
        if self._unread:
            await asyncio.sleep(0)
        else:
            await self._watch.wait()

    def _may_be_ours(self, rank: Rank, name: str) -> bool:
        return self._run_id is None or rank.others.get(name, self._run_id) == self._run_id

    def _is_ours(self, rank: Rank, name: str, arrival: Arrival) -> bool:
        match arrival:
            case DumpFile(dump=dump):
                rid = dump.header.rid
            case ErrorFile(record=record):
                rid = record.rid
            case BrokenFile():
                return True  # its owner cannot be read
        if self._run_id is not None and (run_id := run_of(rid)) != self._run_id:
            if len(rank.others) >= self._max_others:
                rank.others.clear()  # those that are still there may be opened once more
            rank.others[name] = run_id and sys.intern(run_id)
        return rid.startswith(self._rid_prefix)


def disown(ranks: Sequence[Rank]) -> None:
    """Mark every existing file as another run's, unopened: this run has not sent a request yet."""
    known = {rank.directory: rank for rank in ranks}
    with suppress(FileNotFoundError):  # another client removed a dead server's directory
        for directory, name in DirectoryWatch(tuple(known), is_wanted=_is_wanted).poll():
            known[directory].others[name] = None


def _is_wanted(name: str) -> bool:
    return is_dump_name(name) or is_error_name(name)


def _read(directory: Directory, name: str, whole_bytes: int) -> Arrival | None:
    try:
        if is_error_name(name):
            data = directory.read(name, max_bytes=MAX_DOCUMENT_BYTES)
            return ErrorFile(directory, name, decode_error(data))
        dump, beginning = read_beginning(directory, name, whole_bytes=whole_bytes)
        kept = beginning if dump.size_bytes <= whole_bytes else None
        return DumpFile(directory, name, dump, kept)
    except FileNotFoundError:
        return None  # removed by its owner, another run on the same server
    except UnsafeFile as error:
        logger.warning("not a dump, and left alone: %s", error)
        return None
    except DumpFormatError as error:
        return BrokenFile(directory, name, str(error))
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        return BrokenFile(directory, name, str(error))

"""Edge: finds what the plugin wrote under the dump root."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from extractor.directory_watch import DirectoryWatch
from manifest.correlate import Piece
from server_patch.dump_format import (
    Dump,
    DumpFormatError,
    ErrorRecord,
    Ready,
    decode_error,
    is_dump_name,
    is_error_name,
    open_dump,
    read_beginning,
)

#: An error record is a few hundred bytes.
MAX_ERROR_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One writer of a server: a data-parallel rank and the directory it dumps to."""

    directory: Path
    ready: Ready


@dataclass(frozen=True, slots=True)
class DumpFile:
    """A dump and the checked content of its header."""

    path: Path
    dump: Dump
    content: bytes | None = None  # of the whole file, where it was read at once


DumpPiece = Piece[DumpFile]


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokenFile:
    """A file with a final name whose content is not what its name promises."""

    path: Path
    problem: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorFile:
    path: Path
    record: ErrorRecord


Arrival = DumpFile | ErrorFile | BrokenFile


class DumpWatcher:
    """Reports each new file of some ranks once, and opens no other.

    A file that is being written has another name, so what is seen is whole.
    """

    def __init__(self, ranks: Sequence[Rank], *, whole_bytes: int = 0) -> None:
        """`whole_bytes`: dumps of no more are read whole, and kept in memory with their header."""
        self._whole_bytes = whole_bytes
        self._ranks = {rank.directory: rank for rank in ranks}
        self._watch = DirectoryWatch(
            tuple(self._ranks), is_wanted=lambda name: is_dump_name(name) or is_error_name(name)
        )

    def poll(self) -> list[tuple[Rank, Arrival]]:
        """What appeared since the last poll. Raises OSError when a directory is gone."""
        arrivals = (
            (self._ranks[directory], _read(directory / name, self._whole_bytes))
            for directory, name in self._watch.poll()
        )
        return [(rank, arrival) for rank, arrival in arrivals if arrival is not None]

    async def wait(self) -> None:
        """Return when there may be something to poll."""
        await self._watch.wait()


def _read(path: Path, whole_bytes: int) -> Arrival | None:
    try:
        if is_error_name(path.name):
            with open(open_dump(path), "rb") as file:
                return ErrorFile(path=path, record=decode_error(file.read(MAX_ERROR_BYTES)))
        dump, beginning = read_beginning(path, whole_bytes=whole_bytes)
        return DumpFile(path, dump, beginning if dump.size_bytes <= whole_bytes else None)
    except FileNotFoundError:
        return None  # removed by its owner, another run on the same server
    except DumpFormatError as error:
        return BrokenFile(path=path, problem=str(error))

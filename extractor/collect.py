"""Edge: finds what the plugin wrote under the dump root."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

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
    read_header,
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
    """Reports each new file of some ranks once.

    A poll lists the directories, which hold what is in flight and little else, and opens only
    files not seen before. A file that is being written has another name, so what is seen is
    whole.
    """

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = tuple(ranks)
        self._seen: dict[Path, frozenset[str]] = {rank.directory: frozenset() for rank in ranks}

    def poll(self) -> list[tuple[Rank, Arrival]]:
        """What appeared since the last poll. Raises OSError when a directory is gone."""
        return [(rank, arrival) for rank in self._ranks for arrival in self._poll(rank.directory)]

    def _poll(self, directory: Path) -> Iterator[Arrival]:
        with os.scandir(directory) as entries:
            names = frozenset(
                entry.name
                for entry in entries
                if (is_dump_name(entry.name) or is_error_name(entry.name))
                and entry.is_file(follow_symlinks=False)  # the writer makes no other
            )
        # Counters are never used twice by one writer, so a vanished name need not be remembered.
        new, self._seen[directory] = names - self._seen[directory], names
        for name in sorted(new):
            arrival = _read(directory / name)
            if arrival is not None:
                yield arrival


def _read(path: Path) -> Arrival | None:
    try:
        if is_error_name(path.name):
            with open(open_dump(path), "rb") as file:
                return ErrorFile(path=path, record=decode_error(file.read(MAX_ERROR_BYTES)))
        return DumpFile(path, read_header(path))
    except FileNotFoundError:
        return None  # removed by its owner, another run on the same server
    except DumpFormatError as error:
        return BrokenFile(path=path, problem=str(error))

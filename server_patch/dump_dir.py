"""The directory of one writing rank: `<root>/<boot id>/<rank>`, used by no other process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from server_patch.directory import Buffer, Directory
from server_patch.trust import open_or_make, open_trusted

#: A second engine in one process tree inherits the boot id, and takes one of its own.
_MAX_BOOT_IDS: Final = 16
_GROUP_WRITES: Final = 0o020


class RankDirError(RuntimeError):
    """No directory could be made for this rank."""


def _random_hex(num_bytes: int) -> str:
    # Not `secrets`, which every writer process would load with this module.
    return os.urandom(num_bytes).hex()


def make_boot_id() -> str:
    """A new random boot id, 16 hexadecimal digits."""
    return _random_hex(8)


def make_writer_token() -> str:
    """A new random token of a writer: the names of its unfinished files begin with it."""
    return f"{_random_hex(4)}-"


@dataclass(frozen=True, kw_only=True)
class RankDir:
    """The directory of one rank, and the mode of its files."""

    directory: Directory
    boot_id: str
    rank: int
    file_mode: int
    #: Begins the names of the files that this process is writing.
    writer: str = field(default_factory=make_writer_token)

    def write(self, name: str, parts: Sequence[Buffer]) -> int:
        """Write a file whole, in place of one that exists; return its bytes. Raises OSError."""
        return self.directory.write_whole(name, parts, mode=self.file_mode, writer=self.writer)


def make_rank_dir(
    root: Path,
    *,
    boot_id: str,
    rank: int | None,
    num_ranks: int,
    file_mode: int,
    directory_mode: int,
) -> RankDir:
    """Make `<root>/<boot_id>/<rank>`; the last step is exclusive.

    The root may be writable by its group only if the files are. A root that is there keeps its
    mode. rank: None if the engine does not expose it: then the first free one below `num_ranks`.
    Raises RankDirError, UntrustedDirectory, OSError.
    """
    is_shared = bool(directory_mode & _GROUP_WRITES)
    with open_trusted(root, is_shared=is_shared, make_mode=directory_mode) as top:
        candidate = boot_id
        for _ in range(_MAX_BOOT_IDS):
            with open_or_make(top, candidate, mode=directory_mode) as boot:
                for number in range(num_ranks) if rank is None else (rank,):
                    try:
                        directory = boot.make_subdirectory(str(number), mode=directory_mode)
                    except FileExistsError:
                        continue
                    return RankDir(
                        directory=directory, boot_id=candidate, rank=number, file_mode=file_mode
                    )
            candidate = f"{boot_id[:48]}-{_random_hex(4)}"
    raise RankDirError(f"no free directory for rank {rank} under {root / boot_id}")

"""The directory of one writing rank: `<root>/<boot id>/<rank>`, used by no other process."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from server_patch.durable_files import Buffer, replace, write_whole

#: A second engine in one process tree inherits the boot id, and takes one of its own.
_MAX_BOOT_IDS: Final = 16


class RankDirError(RuntimeError):
    """No directory could be made for this rank."""


@dataclass(frozen=True, kw_only=True)
class RankDir:
    """The directory of one rank, and the mode of its files."""

    directory: Path
    boot_id: str
    rank: int
    file_mode: int

    def write(self, name: str, parts: Sequence[Buffer]) -> int:
        """Write a new file whole; return its bytes. Raises OSError."""
        return write_whole(self.directory, name, parts, mode=self.file_mode)

    def replace(self, name: str, data: bytes) -> None:
        """Write a file that may exist already. Raises OSError."""
        replace(self.directory, name, data, mode=self.file_mode)


def make_boot_id() -> str:
    """A new random boot id, 16 hexadecimal digits."""
    return _random_hex(8)


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

    rank: None if the engine does not expose it: then the first free one below `num_ranks`.
    Raises RankDirError, OSError.
    """
    root.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):  # a root that is there keeps the mode it was given
        _make_directory(root, mode=directory_mode)
    candidate = boot_id
    for _ in range(_MAX_BOOT_IDS):
        boot = root / candidate
        with suppress(FileExistsError):
            _make_directory(boot, mode=directory_mode)
        for number in range(num_ranks) if rank is None else (rank,):
            directory = boot / str(number)
            try:
                _make_directory(directory, mode=directory_mode)
            except FileExistsError:
                continue
            return RankDir(directory=directory, boot_id=candidate, rank=number, file_mode=file_mode)
        candidate = f"{boot_id[:48]}-{_random_hex(4)}"
    raise RankDirError(f"no free directory for rank {rank} under {root / boot_id}")


def _random_hex(num_bytes: int) -> str:
    # Not `secrets`, which every writer process would load with this module.
    return os.urandom(num_bytes).hex()


def _make_directory(directory: Path, *, mode: int) -> None:
    """Make `directory` with exactly these permission bits, whatever the umask takes away.

    A set-group-id bit inherited from the parent stays, so that files get the parent's group.
    Raises FileExistsError, OSError.
    """
    directory.mkdir(mode=mode)
    os.chmod(directory, mode | (directory.stat().st_mode & stat.S_ISGID))

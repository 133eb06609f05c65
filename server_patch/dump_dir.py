"""The directory of one writer: `<root>/<boot id>/<rank>`, which no other process shares."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from server_patch.dump_format import FAILED_NAME, READY_NAME
from server_patch.durable_files import replace
from server_patch.ready import encode_failed

#: A second engine in one process tree inherits the boot id, and takes one of its own.
_MAX_BOOT_IDS: Final = 16


class HomeError(RuntimeError):
    """No directory of our own could be made."""


@dataclass(frozen=True, kw_only=True)
class Home:
    """A writer's own directory."""

    directory: Path
    boot_id: str
    rank: int
    file_mode: int


def make_boot_id() -> str:
    return secrets.token_hex(8)


def make_home(
    root: Path,
    *,
    boot_id: str,
    rank: int | None,
    num_ranks: int,
    file_mode: int,
    directory_mode: int,
) -> Home:
    """Make `<root>/<boot_id>/<rank>`; the last step is exclusive.

    rank: None when the engine does not tell it: then the first free one below `num_ranks`.
    Raises HomeError, OSError.
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
            return Home(directory=directory, boot_id=candidate, rank=number, file_mode=file_mode)
        candidate = f"{boot_id[:48]}-{secrets.token_hex(4)}"
    raise HomeError(f"no free directory for rank {rank} under {root / boot_id}")


def _make_directory(directory: Path, *, mode: int) -> None:
    """Make `directory` with exactly these permission bits, whatever the umask takes away.

    A set-group-id bit that it got from its parent stays: by that, files get the parent's group.
    Raises FileExistsError, OSError.
    """
    directory.mkdir(mode=mode)
    os.chmod(directory, mode | (directory.stat().st_mode & stat.S_ISGID))


def tell_failed(home: Home, reason: str) -> None:
    """Write FAILED.json, and take a READY.json back. Raises OSError."""
    (home.directory / READY_NAME).unlink(missing_ok=True)
    replace(home.directory, FAILED_NAME, encode_failed(reason), mode=home.file_mode)

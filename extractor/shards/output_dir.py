"""Prepares the output directory and checks that data is safe there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from extractor.core.errors import SpaceError, UsageError, storage_error
from extractor.core.humanize import amount
from extractor.core.locations import MANIFEST_NAME, SHARDS_DIRECTORY
from extractor.core.timings import DEFAULT_TIMINGS
from extractor.system.files import (
    MEMORY_FILE_SYSTEMS,
    file_system_type,
    free_bytes,
    require_directory,
)
from server_patch.directory import Directory
from server_patch.settings import DEFAULT_FILE_MODE, directory_mode

NETWORK_FILE_SYSTEMS = (
    "nfs", "cifs", "smb", "fuse", "lustre", "ceph", "gpfs", "beegfs", "9p", "afs", "glusterfs",
    "virtiofs",
)  # fmt: skip


def manifest_warning(out: Path) -> str | None:
    """What is wrong with keeping a manifest on the file system of `out`; None when nothing is."""
    kind = file_system_type(out)
    if kind in MEMORY_FILE_SYSTEMS:
        return (
            f"warning: {out} is on {kind}: data set and manifest are lost with this machine's "
            "next start. Name an --out on a disk."
        )
    if kind.startswith(NETWORK_FILE_SYSTEMS):
        return (
            f"warning: {out} is on {kind}: SQLite's locks and its write-ahead log are not reliable "
            "on a network file system. Let no other host open the manifest while this run goes on, "
            "or name an --out on a local disk and copy it."
        )
    return None


def prepare_out(
    out: Path,
    *,
    min_free_bytes: int = DEFAULT_TIMINGS.store.min_free_bytes,
    file_mode: int = DEFAULT_FILE_MODE,
) -> None:
    """Make the output directory and check that it can be written.

    file_mode: the permission bits of files; those of new directories follow from them. Raises
    UsageError, and SpaceError if less than `min_free_bytes` are free.
    """
    try:
        require_directory(out, option="--out")
        _make(Path(os.path.realpath(out)), mode=directory_mode(file_mode))
        with (
            Directory.open(out) as directory,
            directory.new_file(mode=file_mode) as (name, descriptor),
        ):
            os.write(descriptor, b"x")
            directory.unlink(name)
    except NotADirectoryError as error:  # which names a part of the path
        raise storage_error(OSError(error.errno, error.strerror), where=out) from error
    except OSError as error:
        raise storage_error(error, where=out) from error
    if (free := free_bytes(out)) < min_free_bytes:
        raise SpaceError(
            f"{out}: only {amount(free)} free, a run begins with "
            f"{amount(min_free_bytes)} at least. Free space or name another --out."
        )


def mode_of_files(out: Path, *, asked: int | None) -> tuple[int, bool]:
    """The permission bits of new files, and whether the data set's own differ from them.

    Those `asked` for; else those of the manifest, which a resumed data set goes on with; else 600.
    """
    try:
        found = (out / MANIFEST_NAME).lstat().st_mode & 0o664 | DEFAULT_FILE_MODE
    except OSError:  # whatever it is, it is met again where it matters
        return (DEFAULT_FILE_MODE if asked is None else asked), False
    return (found, False) if asked is None else (asked, asked != found)


def _make(path: Path, *, mode: int) -> None:
    """Make a directory and those above it, where they are missing. Raises OSError."""
    if path.is_dir():
        return
    _make(path.parent, mode=mode)
    with Directory.open(path.parent) as parent, suppress(FileExistsError):
        parent.make_subdirectory(path.name, mode=mode).close()


@dataclass(frozen=True, kw_only=True)
class OutputDirectory:
    """The directory of a data set, open, for the one process that writes it."""

    out: Directory
    shards: Directory  # in it
    file_mode: int  # permission bits of new files

    @classmethod
    @contextmanager
    def opened(cls, out: Directory, *, file_mode: int) -> Iterator[OutputDirectory]:
        """Open the shards' directory, or make it. Raises SpaceError, and UsageError where it is
        not one."""
        with _shards_of(out, file_mode=file_mode) as shards:
            yield cls(out=out, shards=shards, file_mode=file_mode)

    def write(self, name: str, data: bytes) -> None:
        """Replace a file durably: there is the old content or the new. Raises OSError."""
        self.out.write_whole(name, [data], mode=self.file_mode, is_durable=True)


def _shards_of(out: Directory, *, file_mode: int) -> Directory:
    try:
        with suppress(FileExistsError):
            return out.make_subdirectory(SHARDS_DIRECTORY, mode=directory_mode(file_mode))
        return out.subdirectory(SHARDS_DIRECTORY)
    except NotADirectoryError as error:
        raise UsageError(
            f"{out.path / SHARDS_DIRECTORY} is a link or a file. Shards are only written to a "
            "directory of that name: move it away, or name another --out."
        ) from error
    except OSError as error:
        raise storage_error(error, where=out.path) from error

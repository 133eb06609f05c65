"""Opens a directory that no other user can change or replace. Standard library only."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Final

from server_patch.directory import Directory

#: Mode bits that let other users than the owner change a directory.
_WRITABLE_BY_OTHERS: Final = 0o022


#: Permission bits of the directories that are made on the way to the one that is asked for.
_PARENT_MODE: Final = 0o755


class UntrustedDirectory(OSError):
    """Other users can change a directory, or what its path leads to; `strerror` says how."""

    owner: int | None = None  # of the directory; None for a link
    bits = 0  # its permission bits that others must not have; 0 where its owner is not trusted


def open_trusted(
    path: Path,
    *,
    owners: Collection[int] = (),
    is_shared: bool = False,
    make_mode: int | None = None,
) -> Directory:
    """Open a directory that no other user can change or replace; files in it must be of `owners`.

    Its owner, and that of each directory on the way, must be root, this user or one of `owners`. No
    directory may be writable by its group or by others, except parents with the sticky bit, in
    which only owners rename. Links on the way are resolved first, then every step is taken by
    descriptor without following any.

    is_shared: the group may write to the directory itself; its files are then told apart by their
    owner. make_mode: make the directory with these permission bits, and its parents, where there is
    none; None: do not. Raises UntrustedDirectory, FileNotFoundError, OSError.
    """
    trusted = {0, os.geteuid(), *owners}
    path = path.absolute()
    if path.is_symlink():
        raise UntrustedDirectory(errno.ELOOP, f"is a link to {path.readlink()}", str(path))
    # The path's links are followed once, here; if one is changed meanwhile, the walk fails.
    real = Path(os.path.realpath(path.parent), path.name)
    if path.name == "..":
        real = Path(os.path.realpath(path))
    directory = Directory.open(Path(real.anchor))
    for depth, step in enumerate(real.parts[1:], 2):
        _require_trusted(directory, trusted, is_parent=True, is_shared=False)
        if make_mode is None:
            directory = directory.subdirectory(step)
        else:
            mode = make_mode if depth == len(real.parts) else _PARENT_MODE
            directory = open_or_make(directory, step, mode=mode)
    _require_trusted(directory, trusted, is_parent=False, is_shared=is_shared)
    directory.owners = frozenset(trusted)
    return directory


def open_or_make(parent: Directory, name: str, *, mode: int) -> Directory:
    """Open a directory, made with these permission bits if there is none. Raises OSError."""
    try:
        return parent.subdirectory(name)
    except FileNotFoundError:
        with suppress(FileExistsError):  # another process was faster
            return parent.make_subdirectory(name, mode=mode)
        return parent.subdirectory(name)


def _require_trusted(
    directory: Directory, trusted: Collection[int], *, is_parent: bool, is_shared: bool
) -> None:
    facts = os.fstat(directory.descriptor)
    place = str(directory.path)
    if facts.st_uid not in trusted:
        raise _untrusted(f"belongs to user {facts.st_uid}", place, facts.st_uid)
    if is_parent and facts.st_mode & stat.S_ISVTX:
        return
    writable = facts.st_mode & (0o002 if is_shared else _WRITABLE_BY_OTHERS)
    if writable:
        who = "others" if writable & 0o002 else "its group"
        mode = stat.S_IMODE(facts.st_mode)
        problem = f"can be changed by {who} (mode {mode:o})"
        raise _untrusted(problem, place, facts.st_uid, writable)


def _untrusted(problem: str, place: str, owner: int, bits: int = 0) -> UntrustedDirectory:
    error = UntrustedDirectory(errno.EPERM, problem, place)
    error.owner, error.bits = owner, bits
    return error

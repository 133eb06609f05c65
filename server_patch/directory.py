"""A directory held by its descriptor: what is read, made and removed lies directly in it.

Another user may swap a parent directory for a link at any moment; a descriptor still names the
directory that was checked. Names are single components, links are never followed, and only regular
files are opened, so that no operation leaves the directory and none waits at a pipe. Standard
library only.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

Buffer = bytes | memoryview

_DIRECTORY_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

#: Begin of the names of files that are being written. Nobody reads them.
TEMPORARY_PREFIX: Final = ".tmp-"


class UnsafeFile(OSError):
    """A link, a pipe, a device, or a file of another user is where a file of ours belongs."""


class Directory:
    """One open directory. Closed by `close`, at the end of a `with` block, or with the object."""

    def __init__(
        self, descriptor: int, path: Path, *, owners: Collection[int] | None = None
    ) -> None:
        """`path`: for messages only. `owners`: user ids whose files are opened, here and below;
        None: any."""
        self.descriptor = descriptor
        self.path = path
        self.owners = None if owners is None else frozenset(owners)

    @classmethod
    def open(cls, path: Path, *, owners: Collection[int] | None = None) -> Directory:
        """Open a directory by its path, whose links are followed. Raises OSError."""
        return cls(os.open(path, _DIRECTORY_FLAGS), path, owners=owners)

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):
            self.close()

    # --- directories -------------------------------------------------------------------------

    def subdirectory(self, name: str) -> Directory:
        """Open a directory in this one. Raises OSError, also for a link; UnsafeFile for one of a
        user who is not among `owners`."""
        descriptor = self._open(name, _DIRECTORY_FLAGS | os.O_NOFOLLOW)
        found = Directory(descriptor, self.path / name, owners=self.owners)
        self._require_owner(os.fstat(descriptor), name)
        return found

    def make_subdirectory(self, name: str, *, mode: int) -> Directory:
        """Make a directory with exactly these permission bits, whatever the umask takes away.

        A set-group-id bit that it inherits stays, so that files get the parent's group. Raises
        FileExistsError, OSError.
        """
        os.mkdir(component(name), mode, dir_fd=self.descriptor)
        made = self.subdirectory(name)
        facts = os.fstat(made.descriptor)
        if facts.st_uid != os.geteuid():  # somebody put another in its place
            raise UnsafeFile(errno.EPERM, "not the directory that was made", str(made.path))
        os.fchmod(made.descriptor, mode | (facts.st_mode & stat.S_ISGID))
        return made

    def require_linked(self) -> None:
        """Raise FileNotFoundError for a directory that was removed."""
        if os.fstat(self.descriptor).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "was removed", str(self.path))

    def names(self) -> list[str]:
        """The names of all entries, in no order. Raises OSError."""
        with self._listing() as descriptor:
            return os.listdir(descriptor)

    def subdirectory_names(self) -> list[str]:
        """The sorted names of the directories in this one, links left out. Raises OSError."""
        with self._listing() as descriptor, os.scandir(descriptor) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))

    def file_names(self) -> list[str]:
        """The names of the regular files in this directory, in no order. Raises OSError."""
        with self._listing() as descriptor, os.scandir(descriptor) as entries:
            return [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]

    @contextmanager
    def _listing(self) -> Iterator[int]:
        """A descriptor of this directory with a position of its own: two threads may list at once.

        Raises FileNotFoundError for a directory that was removed, OSError; with the path."""
        try:
            descriptor = os.open(".", _DIRECTORY_FLAGS, dir_fd=self.descriptor)
            try:
                self.require_linked()  # libc lists a removed one as an empty one
                yield descriptor
            finally:
                os.close(descriptor)
        except OSError as error:
            error.filename = str(self.path)
            raise

    def sync(self) -> None:
        """Make the names durable. Raises OSError."""
        os.fsync(self.descriptor)

    # --- reading -----------------------------------------------------------------------------

    def stat(self, name: str) -> os.stat_result:
        """The facts of an entry itself, a link's not its target's. Raises OSError."""
        return os.stat(component(name), dir_fd=self.descriptor, follow_symlinks=False)

    def exists(self, name: str) -> bool:
        """Whether anything has that name, also a link to nowhere. Raises OSError."""
        try:
            self.stat(name)
        except FileNotFoundError:
            return False
        return True

    def is_regular(self, name: str) -> bool:
        """Whether there is a regular file of that name."""
        with suppress(OSError):
            return stat.S_ISREG(self.stat(name).st_mode)
        return False

    def open_file(self, name: str) -> tuple[int, os.stat_result]:
        """Open a regular file for reading: its descriptor and facts. Raises OSError, UnsafeFile."""
        # A pipe that nobody writes to would be waited for; a regular file ignores O_NONBLOCK.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = self._open(name, flags)
        try:
            facts = self._require_regular(descriptor, name)
            self._require_owner(facts, name)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor, facts

    def read(self, name: str, *, max_bytes: int) -> bytes:
        """All of a regular file. Raises OSError; EFBIG if it has more than `max_bytes`."""
        descriptor, facts = self.open_file(name)
        try:
            data = bytearray()
            if facts.st_size <= max_bytes:
                while len(data) <= max_bytes and (part := os.read(descriptor, 1 << 20)):
                    data += part
            if max(len(data), facts.st_size) > max_bytes:
                raise OSError(errno.EFBIG, f"larger than {max_bytes} bytes", str(self.path / name))
            return bytes(data)
        finally:
            os.close(descriptor)

    # --- writing -----------------------------------------------------------------------------

    def create(self, name: str, *, mode: int) -> int:
        """Make a new file with exactly these permission bits; its descriptor for writing.

        Raises FileExistsError, also where a link has the name; OSError.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(component(name), flags, mode, dir_fd=self.descriptor)
        try:
            os.fchmod(descriptor, mode)  # whatever the umask took away
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def open_to_write(self, name: str, *, mode: int) -> int:
        """Open a file of this user's for reading and writing, made where there is none.

        Raises OSError; UnsafeFile where writing would change anything but a file of ours: a link, a
        second name of another file, a device.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = self._open(name, flags, mode)
        try:
            facts = self._require_regular(descriptor, name)
            if facts.st_nlink > 1:
                raise self._unsafe(name, "has a second name elsewhere")
            if facts.st_uid != os.geteuid():
                raise self._unsafe(name, f"belongs to user {facts.st_uid}")
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def write_whole(
        self,
        name: str,
        parts: Sequence[Buffer],
        *,
        mode: int,
        is_durable: bool = False,
        writer: str = "",
    ) -> int:
        """Write `parts`, one after the other, to the file `name`; return its bytes.

        Plain writes to a new file under a random name, then a rename: a reader sees the whole file
        or what was there before, and a full file system is an error here, not a signal. On any
        error the new file is removed and OSError is raised.

        writer: a token that begins the random name, for `remove_unfinished`.
        """
        component(name)
        with self._new_file(mode, writer) as (temporary, descriptor):
            size_bytes = _write_all(descriptor, parts)
            if is_durable:
                os.fsync(descriptor)
            self.rename(temporary, name)
        if is_durable:
            self.sync()
        return size_bytes

    @contextmanager
    def _new_file(self, mode: int, writer: str) -> Iterator[tuple[str, int]]:
        temporary = f"{TEMPORARY_PREFIX}{writer}{os.urandom(8).hex()}"
        descriptor = self.create(temporary, mode=mode)
        try:
            yield temporary, descriptor
        except BaseException:
            with suppress(OSError):
                self.unlink(temporary)
            raise
        finally:
            os.close(descriptor)

    def rename(self, name: str, new_name: str) -> None:
        """Give an entry another name in this directory; what had it is replaced. Raises OSError."""
        os.rename(
            component(name),
            component(new_name),
            src_dir_fd=self.descriptor,
            dst_dir_fd=self.descriptor,
        )

    # --- removing ----------------------------------------------------------------------------

    def unlink(self, name: str) -> None:
        """Remove a file, or a link itself, if it is still there. Raises OSError."""
        with suppress(FileNotFoundError):
            os.unlink(component(name), dir_fd=self.descriptor)

    def remove_unfinished(self, writer: str = "") -> None:
        """Remove the temporary files of `owners`, or of this user, that a dead process left.

        writer: the token of that process; without it those of every process. Raises OSError.
        """
        owners = self.owners or {os.geteuid()}
        for name in self.names():
            if name.startswith(TEMPORARY_PREFIX + writer):
                with suppress(FileNotFoundError):
                    facts = self.stat(name)
                    if stat.S_ISREG(facts.st_mode) and facts.st_uid in owners:
                        self.unlink(name)

    def remove_subdirectory(self, name: str) -> None:
        """Remove an empty directory. Raises OSError."""
        os.rmdir(component(name), dir_fd=self.descriptor)

    def remove_tree(self, name: str) -> None:
        """Remove a directory and everything below it, links themselves, never what they point at.

        Raises OSError for what could not be removed; FileNotFoundError where there is none.
        """
        import shutil  # slow to import, and every writer process imports this module

        # With a directory descriptor it descends by descriptors alone.
        try:
            shutil.rmtree(component(name), dir_fd=self.descriptor)
        except RecursionError as error:  # it recurses before Python 3.13
            problem = "too many directories in one another"
            raise OSError(errno.ENAMETOOLONG, problem, str(self.path / name)) from error

    # --- checks ------------------------------------------------------------------------------

    def _open(self, name: str, flags: int, mode: int = 0) -> int:
        try:
            return os.open(component(name), flags, mode, dir_fd=self.descriptor)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise self._unsafe(name, "not a regular file") from error
            error.filename = str(self.path / name)
            raise

    def _require_regular(self, descriptor: int, name: str) -> os.stat_result:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise self._unsafe(name, "not a regular file")
        return facts

    def _require_owner(self, facts: os.stat_result, name: str) -> None:
        if self.owners is not None and facts.st_uid not in self.owners:
            raise self._unsafe(name, f"belongs to user {facts.st_uid}")

    def _unsafe(self, name: str, problem: str) -> UnsafeFile:
        return UnsafeFile(errno.EPERM, problem, str(self.path / name))


_COMPONENT = re.compile(r"[^/\0]{1,255}")


def component(name: str) -> str:
    """The name itself, if it is one component of a path. Raises UnsafeFile.

    >>> component("../passwd")
    Traceback (most recent call last):
    server_patch.directory.UnsafeFile: [Errno 22] not the name of a file: '../passwd'
    """
    if _COMPONENT.fullmatch(name) is None or name in (".", ".."):
        raise UnsafeFile(errno.EINVAL, "not the name of a file", name[:80])
    return name


def _write_all(descriptor: int, parts: Sequence[Buffer]) -> int:
    pending = [memoryview(part) for part in parts if len(part)]
    total = 0
    while pending:
        written = os.writev(descriptor, pending)
        total += written
        while pending and written >= len(pending[0]):
            written -= len(pending.pop(0))
        if written:
            pending[0] = pending[0][written:]
    return total

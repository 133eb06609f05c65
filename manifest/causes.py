"""The causes of failed system calls: one table from errno to a message and advice. Pure.

`extractor.core.errors` and `manifest.database` use it for their messages. An errno that is not in
the table is shown by its own name, and does not count as a storage failure.

Exit status 4 means that a disk or memory is full, or that a device or a file system fails
(`Cause.is_storage`): once that is fixed, the same command resumes. All other errnos, listed or not,
have exit status 2: the user must change a path, a permission or a limit.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Cause:
    """The reason why the operating system refused a file operation."""

    what: str
    advice: str  # an imperative, without a full stop
    is_storage: bool = False  # disk or memory is full, or a device fails


_FULL: Final = Cause(what="no space left", advice="free space", is_storage=True)
_QUOTA: Final = Cause(
    what="the disk quota is used up", advice="free space or raise the quota", is_storage=True
)
_BROKEN: Final = Cause(
    what="the disk or its file system fails",
    advice="see the kernel's log (dmesg) and check the disk",
    is_storage=True,
)
_DETACHED: Final = Cause(
    what="the device or the network file system is gone",
    advice="mount it again",
    is_storage=True,
)
_SILENT: Final = Cause(
    what="the file system did not finish the operation",
    advice="check that its server is reachable",
    is_storage=True,
)
_MEMORY: Final = Cause(what="out of memory", advice="free memory", is_storage=True)
_FORBIDDEN: Final = Cause(
    what="this user has no permission",
    advice="give this user the permission, or name another directory",
)
_READ_ONLY: Final = Cause(
    what="the file system is read-only",
    advice="mount it for writing, or name another directory",
)
_MISSING: Final = Cause(what="it does not exist", advice="check the path")
_IN_THE_WAY: Final = Cause(
    what="a file of that name exists already", advice="remove it, or name another path"
)
_PART_IS_A_FILE: Final = Cause(
    what="a part of the path is not a directory", advice="name another path"
)
_DIRECTORY: Final = Cause(what="it is a directory, not a file", advice="name another path")
_LOOP: Final = Cause(what="its symbolic links form a loop", advice="name another path")
_TOO_LONG: Final = Cause(what="the name is too long", advice="name another path")
_BAD_NAME: Final = Cause(
    what="the file system does not accept that name", advice="name another path"
)
_IN_USE: Final = Cause(
    what="another program is using it", advice="end that program, or name another path"
)
_TOO_MANY_FILES: Final = Cause(
    what="this process has too many open files",
    advice="raise the limit with `ulimit -n`, or lower --concurrency",
)
_TOO_MANY_FILES_IN_ALL: Final = Cause(
    what="this machine has too many open files",
    advice="end other programs, or raise the limit fs.file-max",
)
_TOO_LARGE: Final = Cause(
    what="the file would be larger than the file system or `ulimit -f` allows",
    advice="raise that limit, lower --shard-size, or name another directory",
)
_NO_LOCKS: Final = Cause(
    what="the file system has no working locks",
    advice="name a directory on a local disk, or mount it with locks",
)
_UNSUPPORTED: Final = Cause(
    what="the file system does not support the operation", advice="name another directory"
)

#: Errno -> cause, for opening, creating, writing, reading or removing a file or directory.
CAUSES: Final[Mapping[int, Cause]] = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _QUOTA,
    errno.EIO: _BROKEN,
    errno.EUCLEAN: _BROKEN,
    errno.EBADMSG: _BROKEN,
    errno.EREMOTEIO: _BROKEN,
    errno.ENODEV: _DETACHED,
    errno.ENXIO: _DETACHED,
    errno.ENOMEDIUM: _DETACHED,
    errno.ESTALE: _DETACHED,
    errno.ENOTCONN: _DETACHED,
    errno.ESHUTDOWN: _DETACHED,
    errno.EHOSTDOWN: _DETACHED,
    errno.EINTR: _SILENT,
    errno.EAGAIN: _SILENT,
    errno.ETIMEDOUT: _SILENT,
    errno.ENOMEM: _MEMORY,
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
    errno.EROFS: _READ_ONLY,
    errno.ENOENT: _MISSING,
    errno.EEXIST: _IN_THE_WAY,
    errno.ENOTEMPTY: _IN_THE_WAY,
    errno.ENOTDIR: _PART_IS_A_FILE,
    errno.EISDIR: _DIRECTORY,
    errno.ELOOP: _LOOP,
    errno.ENAMETOOLONG: _TOO_LONG,
    errno.EILSEQ: _BAD_NAME,
    errno.ETXTBSY: _IN_USE,
    errno.EBUSY: _IN_USE,
    errno.EMFILE: _TOO_MANY_FILES,
    errno.ENFILE: _TOO_MANY_FILES_IN_ALL,
    errno.EFBIG: _TOO_LARGE,
    errno.EOVERFLOW: _TOO_LARGE,
    errno.ENOLCK: _NO_LOCKS,
    errno.ENOSYS: _UNSUPPORTED,
    errno.EOPNOTSUPP: _UNSUPPORTED,
    errno.EINVAL: _UNSUPPORTED,
    errno.EXDEV: _UNSUPPORTED,
    errno.ENOTTY: _UNSUPPORTED,
}
#: Errnos with which a file system without locks refuses one.
NO_LOCKS_ERRNOS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

#: Sockets and bugs of ours raise these, too; they concern a file only if the error names one.
AMBIGUOUS_ERRNOS: Final = (
    errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EOPNOTSUPP, errno.EAGAIN, errno.EINTR,
    errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN,
)  # fmt: skip
#: Limits of this process or machine, not problems with the file.
LIMIT_ERRNOS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def cause_of(number: int | None) -> Cause:
    """The cause of an errno; a generic one if the table does not list it."""
    found = CAUSES.get(number or 0)
    return found or Cause(
        what="the operating system refused it", advice="look up that error, change what causes it"
    )


def named(number: int | None, text: str | None = None) -> str:
    """The errno's name and the system's message for it.

    >>> named(28)
    'ENOSPC: No space left on device'
    """
    if number is None:
        return text or "unknown error"
    name = errno.errorcode.get(number, f"errno {number}")
    return f"{name}: {text or os.strerror(number)}"

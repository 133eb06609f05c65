"""The causes of failed system calls: one table from errno to a message and advice. Pure.

A cause that `is_storage` has exit status 4: once a disk, memory or device is right again, the same
command resumes. All other errnos, listed or not, have exit status 2: the user must change a path, a
permission or a limit.
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


#: What and advice of each cause, and the errnos that it has when a file or directory is opened,
#: created, written, read or removed. First those of a full disk or memory, or a failing device.
_STORAGE: Final = {
    ("no space left", "free space"): (errno.ENOSPC,),
    ("the disk quota is used up", "free space or raise the quota"): (errno.EDQUOT,),
    ("the disk or its file system fails", "see the kernel's log (dmesg) and check the disk"): (
        errno.EIO,
        errno.EUCLEAN,
        errno.EBADMSG,
        errno.EREMOTEIO,
    ),
    ("the device or the network file system is gone", "mount it again"): (
        errno.ENODEV,
        errno.ENXIO,
        errno.ENOMEDIUM,
        errno.ESTALE,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
        errno.EHOSTDOWN,
    ),
    ("the file system did not finish the operation", "check that its server is reachable"): (
        errno.EINTR,
        errno.EAGAIN,
        errno.ETIMEDOUT,
    ),
    ("out of memory", "free memory"): (errno.ENOMEM,),
}
_OTHERS: Final = {
    ("this user has no permission", "give this user the permission, or name another directory"): (
        errno.EACCES,
        errno.EPERM,
    ),
    ("the file system is read-only", "mount it for writing, or name another directory"): (
        errno.EROFS,
    ),
    ("it does not exist", "check the path"): (errno.ENOENT,),
    ("a file of that name exists already", "remove it, or name another path"): (
        errno.EEXIST,
        errno.ENOTEMPTY,
    ),
    ("a part of the path is not a directory", "name another path"): (errno.ENOTDIR,),
    ("it is a directory, not a file", "name another path"): (errno.EISDIR,),
    ("its symbolic links form a loop", "name another path"): (errno.ELOOP,),
    ("the name is too long", "name another path"): (errno.ENAMETOOLONG,),
    ("the file system does not accept that name", "name another path"): (errno.EILSEQ,),
    ("another program is using it", "end that program, or name another path"): (
        errno.ETXTBSY,
        errno.EBUSY,
    ),
    (
        "this process has too many open files",
        "raise the limit with `ulimit -n`, or lower --concurrency",
    ): (errno.EMFILE,),
    (
        "this machine has too many open files",
        "end other programs, or raise the limit fs.file-max",
    ): (errno.ENFILE,),
    (
        "the file would be larger than the file system or `ulimit -f` allows",
        "raise that limit, lower --shard-size, or name another directory",
    ): (errno.EFBIG, errno.EOVERFLOW),
    (
        "the file system has no working locks",
        "name a directory on a local disk, or mount it with locks",
    ): (errno.ENOLCK,),
    ("the file system does not support the operation", "name another directory"): (
        errno.ENOSYS,
        errno.EOPNOTSUPP,
        errno.EINVAL,
        errno.EXDEV,
        errno.ENOTTY,
    ),
}
#: Errno -> cause.
CAUSES: Final[Mapping[int, Cause]] = {
    number: Cause(what=what, advice=advice, is_storage=table is _STORAGE)
    for table in (_STORAGE, _OTHERS)
    for (what, advice), numbers in table.items()
    for number in numbers
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

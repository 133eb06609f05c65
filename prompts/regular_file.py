"""Opens a file that a user or another file names, if it is a regular one."""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO


class NotRegular(OSError):
    """A pipe, a device or a socket is where a file belongs."""


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open for reading, without waiting. Raises NotRegular, OSError; ValueError for a NUL."""
    try:
        stream = open(path, "rb", opener=_open_without_waiting)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a device without a driver
            raise NotRegular(errno.ENXIO, "not a regular file", os.fspath(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise NotRegular(errno.EINVAL, "not a regular file", os.fspath(path))
    return stream


def read_regular(path: str | os.PathLike[str], *, max_bytes: int) -> bytes:
    """All of a regular file. Raises NotRegular, OSError; EFBIG if it has more bytes."""
    with open_regular(path) as stream:
        data = stream.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes} bytes", os.fspath(path))
    return data


def _open_without_waiting(path: str, flags: int) -> int:
    # Opening a pipe that nobody writes to would wait for ever; a regular file ignores the flag.
    return os.open(path, flags | os.O_NONBLOCK)

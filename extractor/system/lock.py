"""Edge: one writer per output directory."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from extractor.core.errors import ExtractorError, OutputBusy, UsageError, storage_error
from extractor.system.process_id import is_same_process, pid_namespace, process_start_ticks
from manifest.causes import NO_LOCKS_ERRNOS
from server_patch.directory import Directory, UnsafeFile
from server_patch.settings import DEFAULT_FILE_MODE

LOCK_NAME = ".lock"


@contextmanager
def exclusive(out: Path, *, file_mode: int = DEFAULT_FILE_MODE) -> Iterator[Directory]:
    """Hold `out` for this process, open; the kernel lets go of it however the process ends.

    Files that a killed holder had not finished are removed. Raises OutputBusy naming the process
    that holds it, UsageError if the directory cannot be written or locked, and SpaceError.
    """
    try:
        directory = Directory.open(out)
        descriptor = directory.open_to_write(LOCK_NAME, mode=file_mode)
    except UnsafeFile as error:
        raise UsageError(
            f"{out / LOCK_NAME} {error.strerror}, and nothing was changed. A data set is written "
            "by one user, or by several where the directory is owned by who wrote its files. "
            "Name another --out."
        ) from error
    except OSError as error:
        raise storage_error(error, where=out) from error
    with directory:
        try:
            _lock(out, descriptor)
            directory.remove_unfinished()
            os.ftruncate(descriptor, 0)
            start_ticks, namespace = process_start_ticks(os.getpid()), pid_namespace()
            os.pwrite(descriptor, f"{os.getpid()} {start_ticks} {namespace}".encode(), 0)
            try:
                yield directory
            finally:
                with suppress(OSError):  # the error that ended this is the one to show
                    os.ftruncate(descriptor, 0)
        finally:
            os.close(descriptor)


def _lock(out: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        (holder, *_) = os.pread(descriptor, 128, 0).decode(errors="replace").split() or [""]
        raise OutputBusy(
            f"{out} is being written by process {holder if holder.isdecimal() else 'unknown'}. "
            "Wait for it, stop it, or use another --out."
        ) from None
    except OSError as error:
        raise _without_locks(out, error) from error


def _without_locks(out: Path, error: OSError) -> ExtractorError:
    # A file system without locks reports one of several errnos; report all of them as ENOLCK.
    if error.errno not in NO_LOCKS_ERRNOS:
        return storage_error(error, where=out)
    number = errno.ENOLCK
    return storage_error(OSError(number, os.strerror(number)), where=out)


def writer_of(out: Path) -> int | None:
    """The pid of another process that holds `out`, if one does that can be seen from here.

    By what it wrote: trying the lock would get in the way of a run that starts.
    """
    try:
        with Directory.open(out) as directory:
            content = directory.read(LOCK_NAME, max_bytes=4096)
        pid, start_ticks, namespace = content.decode(errors="replace").split()
        if int(pid) == os.getpid() or namespace != pid_namespace():
            return None
        return int(pid) if is_same_process(int(pid), int(start_ticks), namespace) else None
    except (OSError, ValueError, OverflowError):
        return None

"""Edge: one writer per output directory."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from extractor.errors import OutputBusy, UsageError

LOCK_NAME = ".lock"


@contextmanager
def exclusive(out: Path) -> Iterator[None]:
    """Hold `out` for this process; the kernel lets go of it however the process ends.

    Raises OutputBusy naming the process that holds it, UsageError where nothing can be written.
    """
    try:
        descriptor = os.open(out / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UsageError(
            f"{out} cannot be written ({error.strerror}). Nothing was changed: name a directory "
            "that this user can write, or make this one so."
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            raise OutputBusy(
                f"{out} is being written by process {holder}. "
                "Wait for it, stop it, or use another --out."
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)

"""Edge: a file that grows at its end, past the page cache where the file system can.

Bytes are gathered in one aligned buffer and leave it in large writes. On the file systems of local
disks these are direct (O_DIRECT): a copy into the page cache would be most of the work, and push
everything else out of memory. Elsewhere the same writes are buffered.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterable

from extractor.system.files import file_system_type, write_at

#: Of file offsets, lengths and memory of a direct write: the largest logical block of any disk.
ALIGNMENT = 4096
#: Large enough for a disk's full speed with two files at a time.
BUFFER_BYTES = 4 << 20
#: Where direct writes are known to be as durable and as fast as they should be. Not btrfs, whose
#: checksums they can miss, nor network file systems.
DIRECT_FILE_SYSTEMS = ("ext4", "xfs")


class AppendFile:
    """Not thread-safe. `position` is where the next byte goes; what lies behind it in the file is
    of no meaning (padding of the last direct write, or an earlier process's rest)."""

    def __init__(self, descriptor: int, *, position: int) -> None:
        """Take over the descriptor of a file that is open to read and write. Raises OSError."""
        self._descriptor = descriptor
        self._base = 0  # file offset of the buffer's begin, aligned
        self._fill = 0
        try:
            self._buffer = memoryview(mmap.mmap(-1, BUFFER_BYTES))  # whole pages: aligned
            if file_system_type(descriptor) in DIRECT_FILE_SYSTEMS:
                self._set_direct(True)
            self.rewind(position)
        except BaseException:
            self.close()
            raise

    @property
    def position(self) -> int:
        return self._base + self._fill

    def room(self, size: int) -> memoryview:
        """Where the next bytes can be put, at most `size` (1 or more). `advance` by what was put
        there before anything else is asked of the file."""
        if self._fill == BUFFER_BYTES:
            self._write_out(BUFFER_BYTES)
        return self._buffer[self._fill : min(self._fill + size, BUFFER_BYTES)]

    def advance(self, count: int) -> None:
        """The first `count` bytes of the last `room` are appended."""
        self._fill += count

    def write(self, data: bytes | memoryview) -> None:
        """Append all of `data`. Raises OSError."""
        view = memoryview(data).cast("B")
        while view:
            room = self.room(len(view))
            room[:] = view[: len(room)]
            self.advance(len(room))
            view = view[len(room) :]

    def rewind(self, position: int) -> None:
        """Go back (or, before the first byte, forward) to `position`; what is behind is dropped."""
        if self._base <= position <= self._base + self._fill:
            self._fill = position - self._base
            return
        # The bytes before it in its block are written again with those that follow.
        self._base = position // ALIGNMENT * ALIGNMENT
        self._fill = position - self._base
        block = self._buffer[:ALIGNMENT]
        block[:] = bytes(ALIGNMENT)
        if self._fill:
            # Fewer bytes come where the file ends before.
            self._unless_refused(lambda: os.preadv(self._descriptor, [block], self._base))

    def sync(self) -> None:
        """Make every byte before `position` durable. Raises OSError."""
        self._write_out(self._fill)
        os.fdatasync(self._descriptor)

    def finish(self, begin: Iterable[bytes]) -> None:
        """Cut the file at `position`, put the blocks of `begin` over its first bytes, and make all
        of it durable. Nothing can be appended after that. Raises OSError."""
        self._write_out(self._fill)
        self._set_direct(False)
        os.ftruncate(self._descriptor, self.position)
        offset = 0
        for block in begin:
            write_at(self._descriptor, block, offset)
            offset += len(block)
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)

    def _write_out(self, count: int) -> None:
        """Write the buffer's first `count` bytes; those of a block begun stay, to be written again
        with the rest of it."""
        whole, begun = divmod(count, ALIGNMENT)
        end = (whole + bool(begun)) * ALIGNMENT
        self._buffer[count:end] = bytes(end - count)
        self._unless_refused(lambda: write_at(self._descriptor, self._buffer[:end], self._base))
        if whole:
            self._buffer[:begun] = self._buffer[count - begun : count]
            self._base += whole * ALIGNMENT
            self._fill -= whole * ALIGNMENT

    def _unless_refused(self, transfer: Callable[[], object]) -> None:
        """Read or write; buffered from now on where a disk or driver wants another alignment."""
        try:
            transfer()
        except OSError as error:
            if error.errno != errno.EINVAL or not self._is_direct:
                raise
            self._set_direct(False)
            transfer()

    @property
    def _is_direct(self) -> bool:
        return bool(fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & os.O_DIRECT)

    def _set_direct(self, is_direct: bool) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        flags = flags | os.O_DIRECT if is_direct else flags & ~os.O_DIRECT
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags)

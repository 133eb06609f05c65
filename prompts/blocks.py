"""A file read in blocks, each compared with its digest before any byte of it is used.

A prompt file is read several times: scanned first, then read for its prompts, perhaps once more for
dumps that an earlier session left, and again when a server comes back. It may be overwritten in
between. So the scan keeps a digest of each block, and every later read digests the block again, in
memory, and gives out the bytes that it digested. A prompt is thus made from scanned bytes or not at
all. Times and sizes of the file prove less: they can be restored, stand still for a clock tick, or
be cached by a network file system.

The digests take 16 bytes for each MiB of the file and nothing for its rows.
"""

from __future__ import annotations

import io
import os
from typing import BinaryIO, Final

import xxhash

from prompts.types import InputError

BLOCK_BYTES: Final = 1 << 20
DIGEST_BYTES: Final = 16


class BlockFile(io.RawIOBase):
    """A regular file; it records digests while it is scanned, and is proven by them afterwards.

    Without `digests`, blocks that are read in order are recorded; each is compared when it is read
    again. Only blocks behind those recorded so far are given out unproven.
    """

    def __init__(self, file: BinaryIO, path: str, digests: bytes | None = None) -> None:
        """`path`: for messages. `digests`: of all blocks, as the scan recorded them."""
        self._descriptor = file.fileno()
        self._path = path
        self._digests = bytearray(digests or b"")
        self._is_complete = digests is not None
        self._digest = xxhash.xxh3_128()
        #: Bytes recorded so far.
        self.size_bytes = 0
        self._position = 0
        self._block = bytearray(BLOCK_BYTES)
        self._index = -1  # of the block that is in it
        self._length = 0

    @property
    def digests(self) -> bytes:
        """Of the blocks recorded so far."""
        return bytes(self._digests)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_CUR:
            offset += self._position
        elif whence == os.SEEK_END:
            offset += os.fstat(self._descriptor).st_size
            self._index = -1  # a file of another length shows in its last block, read anew
        self._position = offset
        return offset

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill the buffer, but for the end of the file. Raises `InputError` where it changed."""
        view = memoryview(buffer).cast("B")
        size = 0
        while size < len(view):
            index, start = divmod(self._position, BLOCK_BYTES)
            if not start and len(view) - size >= BLOCK_BYTES and index != self._index:
                got = self._read_block(index, view[size : size + BLOCK_BYTES])
            else:
                if index != self._index:
                    self._index = -1  # until the block is proven
                    self._length = self._read_block(index, memoryview(self._block))
                    self._index = index
                part = memoryview(self._block)[start : self._length][: len(view) - size]
                view[size : size + len(part)] = part
                got = len(part)
            if not got:
                break
            size += got
            self._position += got
        return size

    def drain(self) -> str:
        """Record the blocks that are left; the digest of the whole file, 32 hexadecimal digits."""
        block = memoryview(bytearray(BLOCK_BYTES))
        while not self._is_complete:
            self._read_block(len(self._digests) // DIGEST_BYTES, block)
        return self._digest.hexdigest()

    def _read_block(self, index: int, into: memoryview) -> int:
        """Its bytes, recorded or proven; how many there are."""
        size = self._read_bytes(index * BLOCK_BYTES, into)
        data = into[:size]
        digest = xxhash.xxh3_128_digest(data) if size else b""
        start = index * DIGEST_BYTES
        if start < len(self._digests) or self._is_complete:
            if digest != self._digests[start : start + DIGEST_BYTES]:
                raise InputError(
                    f"{self._path}: changed after it was scanned. No prompt was made from the new "
                    "content, and what is stored is sound. Restore the old content and run the "
                    "same command again, or use a new --out for the new content."
                )
        elif start == len(self._digests):
            self._digests += digest
            self._digest.update(data)
            self.size_bytes += size
            self._is_complete = size < BLOCK_BYTES
        return size

    def _read_bytes(self, offset: int, into: memoryview) -> int:
        size = 0
        while size < len(into) and (
            got := os.preadv(self._descriptor, [into[size:]], offset + size)
        ):
            size += got
        return size

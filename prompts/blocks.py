"""Reads a file in blocks and checks the digest of each block before any of its bytes is used.

A prompt file is read several times: first for the scan, then for its prompts, perhaps again for
dumps that an earlier session left, and again when a server comes back. It may be overwritten in
between. The scan therefore records a digest of each block; every later read hashes the block in
memory and returns exactly the bytes that it hashed. A prompt is thus made from scanned bytes or not
at all. The file's times and size prove less: they can be restored, stay equal within a clock tick,
or be cached by a network file system.

The digests take 16 bytes for each MiB of the file, however many rows it has.
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
    """A regular file that records block digests on the first read and checks them afterwards.

    Without `digests`, the digests of blocks that are read in order are recorded, and checked when a
    block is read again. Only blocks after those recorded so far are returned unchecked.
    """

    def __init__(self, file: BinaryIO, path: str, digests: bytes | None = None) -> None:
        """`path`: for messages. `digests`: those of all blocks, as the scan recorded them."""
        self._descriptor = file.fileno()
        self._path = path
        self._digests = bytearray(digests or b"")
        self._is_complete = digests is not None
        self._digest = xxhash.xxh3_128()
        #: Bytes recorded so far.
        self.size_bytes = 0
        self._position = 0
        self._block = bytearray(BLOCK_BYTES)
        self._index = -1  # of the block in the buffer
        self._length = 0

    @property
    def digests(self) -> bytes:
        """The digests of the blocks recorded so far."""
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
            self._index = -1  # read the last block again: it reveals a changed length
        self._position = offset
        return offset

    def read(self, size: int = -1) -> bytes:
        """As any file's, without room for more than there is: a size may be a damaged file's."""
        left = max(0, os.fstat(self._descriptor).st_size - self._position)
        return super().read(left if size < 0 else min(size, left)) or b""

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill the buffer, less only at the end of the file. Raises `InputError` if it changed."""
        view = memoryview(buffer).cast("B")
        size = 0
        while size < len(view):
            index, start = divmod(self._position, BLOCK_BYTES)
            if not start and len(view) - size >= BLOCK_BYTES and index != self._index:
                got = self._read_block(index, view[size : size + BLOCK_BYTES])
            else:
                if index != self._index:
                    self._index = -1  # until the block has been checked
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
        """Record the remaining blocks; return the file's digest, 32 hexadecimal digits."""
        block = memoryview(bytearray(BLOCK_BYTES))
        while not self._is_complete:
            self._read_block(len(self._digests) // DIGEST_BYTES, block)
        return self._digest.hexdigest()

    def _read_block(self, index: int, into: memoryview) -> int:
        """Read a block, and record or check its digest; return its number of bytes."""
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

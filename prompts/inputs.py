"""Input files -> numbered rows of bytes. Knows lines, not JSON.

A row is a non-blank line. Only a line feed ends a line (a carriage return before it is white space
to JSON), so a U+2028 inside a string splits nothing. One UTF-8 byte order mark at the start of a
file is dropped.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import xxhash

from prompts.types import InputError

CHUNK_BYTES: Final = 1 << 20
UTF8_BOM: Final = b"\xef\xbb\xbf"

#: First bytes of files that are no JSONL -> what they are and what to do.
FOREIGN_MAGIC: Final[tuple[tuple[bytes, str], ...]] = (
    (b"\x1f\x8b", "gzip is not supported yet: decompress it (gunzip)"),
    (b"\x28\xb5\x2f\xfd", "zstd is not supported yet: decompress it (zstd -d)"),
    (b"BZh", "bzip2 is not supported: decompress it (bunzip2)"),
    (b"\xfd7zXZ\x00", "xz is not supported: decompress it (unxz)"),
    (b"PK\x03\x04", "zip archives are not supported: unpack it"),
    (b"PAR1", "Parquet is not supported yet: convert it to JSONL"),
    (b"ARROW1", "Arrow is not supported yet: convert it to JSONL"),
    (b"\xff\xff\xff\xff", "Arrow is not supported yet: convert it to JSONL"),
    (b"\xff\xfe", "the file is UTF-16 or UTF-32: convert it to UTF-8 (iconv -t UTF-8)"),
    (b"\xfe\xff", "the file is UTF-16: convert it to UTF-8 (iconv -t UTF-8)"),
    (b"\x00\x00\xfe\xff", "the file is UTF-32: convert it to UTF-8 (iconv -t UTF-8)"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """One input file as `scan_inputs` found it."""

    path: str  # as it was given
    size_bytes: int
    digest: str  # XXH3-128 of the content, 32 hexadecimal digits
    num_rows: int  # non-blank lines, at least 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RawRow:
    """One non-blank line, not parsed yet."""

    ordinal: int  # position among the non-blank lines of all files, from 0
    source: str  # path of the file, as it was given
    line: int  # line in that file, from 1
    data: bytes


def scan_inputs(paths: Iterable[str | Path]) -> tuple[InputFile, ...]:
    """Digests and counts each file, in the order given: one pass each, in constant memory.

    Raises `InputError` for a file that cannot be read as JSONL, before any row of any file is used.
    """
    return tuple(_scan(os.fspath(path)) for path in paths)


def read_rows(files: Iterable[InputFile]) -> Iterator[RawRow]:
    """Yields the rows of scanned files in order; holds one line at a time.

    Raises `InputError` where a file cannot be read or no longer has the rows that were counted:
    ordinals would then name other rows than before.
    """
    ordinal = 0
    for file in files:
        end = ordinal + file.num_rows
        with _open(file.path) as stream:
            for line, data in enumerate(_lines(stream, file.path), start=1):
                if not data.strip():
                    continue
                if ordinal == end:
                    raise _changed(file.path)
                yield RawRow(ordinal=ordinal, source=file.path, line=line, data=data)
                ordinal += 1
        if ordinal != end:
            raise _changed(file.path)


def _scan(path: str) -> InputFile:
    digest = xxhash.xxh3_128()
    size_bytes = num_rows = 0
    row_open = False  # the line that runs into the next chunk has a non-blank byte
    with _open(path) as stream:
        for chunk in _chunks(stream, path):
            if not size_bytes:
                _check_start(chunk, path)
            digest.update(chunk)
            pieces = (chunk if size_bytes else chunk.removeprefix(UTF8_BOM)).split(b"\n")
            size_bytes += len(chunk)
            for piece in pieces[:-1]:
                num_rows += row_open or bool(piece.strip())
                row_open = False
            row_open = row_open or bool(pieces[-1].strip())
    num_rows += row_open
    if not num_rows:
        raise InputError(f"{path}: no rows: give a file with one JSON object on each line")
    return InputFile(path=path, size_bytes=size_bytes, digest=digest.hexdigest(), num_rows=num_rows)


def _open(path: str) -> BinaryIO:
    try:
        stream = open(path, "rb", opener=_open_without_waiting)
    except IsADirectoryError as exc:
        raise InputError(f"{path}: is a directory: name the files in it") from exc
    except FileNotFoundError as exc:
        raise InputError(f"{path}: no such file: check the path") from exc
    except (OSError, ValueError) as exc:  # ValueError: a NUL in the path
        raise InputError(
            f"{path}: cannot be opened ({exc}): check the path and its rights"
        ) from exc
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise InputError(
            f"{path}: not a regular file, and it is read twice: save it to a file first"
        )
    return stream


def _open_without_waiting(path: str, flags: int) -> int:
    # Opening a pipe that nobody writes to would wait for ever; a regular file ignores the flag.
    return os.open(path, flags | os.O_NONBLOCK)


def _chunks(stream: BinaryIO, path: str) -> Iterator[bytes]:
    try:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk
    except OSError as exc:
        raise _unreadable(path, exc) from exc


def _lines(stream: BinaryIO, path: str) -> Iterator[bytes]:
    try:
        for line, data in enumerate(stream):
            yield data if line else data.removeprefix(UTF8_BOM)
    except OSError as exc:
        raise _unreadable(path, exc) from exc


def _check_start(chunk: bytes, path: str) -> None:
    for magic, remedy in FOREIGN_MAGIC:
        if chunk.startswith(magic):
            raise InputError(f"{path}: not JSONL: {remedy}")
    start = chunk.removeprefix(UTF8_BOM).lstrip()
    if start.startswith(b"["):
        raise InputError(
            f"{path}: a JSON array, not JSONL: write one object on each line (jq -c '.[]')"
        )


def _unreadable(path: str, exc: OSError) -> InputError:
    return InputError(f"{path}: cannot be read ({exc}): check the disk or copy the file")


def _changed(path: str) -> InputError:
    return InputError(f"{path}: changed while it was being read: leave it alone and start again")

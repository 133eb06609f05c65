"""One input file -> its rows as JSON, whatever it is wrapped in. Told by content, not by name.

JSONL: a row is a non-blank line. Only a line feed ends a line (a carriage return before it is white
space to JSON), so a U+2028 inside a string splits nothing.
JSON array: a row is an element of the outermost array.
Parquet, Arrow: a row is a row.
The first two and Parquet may be compressed with gzip or zstd. One UTF-8 byte order mark at the
start is dropped. Memory does not grow with the file: it holds one row, or one batch of rows, at a
time, and a row of more than `MAX_ROW_BYTES` is skipped.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, BinaryIO, Final

from prompts import token_bound
from prompts.arrow import NumberedRow, Place, arrow_rows, parquet_num_rows, parquet_rows
from prompts.blocks import BlockFile
from prompts.compression import (
    CHUNK_BYTES,
    GZIP_MAGIC,
    ZSTD_MAGIC,
    decompressed,
    explained,
)
from prompts.json_array import ArrayFault, array_elements
from prompts.regular_file import NotRegular, open_regular
from prompts.types import InputError

UTF8_BOM: Final = b"\xef\xbb\xbf"
PARQUET_MAGIC: Final = b"PAR1"
ARROW_MAGICS: Final = (b"ARROW1", b"\xff\xff\xff\xff")
#: After this many blank lines in a row, further ones are skipped in blocks.
MANY_BLANK_LINES: Final = 64

#: First bytes of files that hold no rows for us -> what they are and what to do.
FOREIGN_MAGIC: Final[tuple[tuple[bytes, str], ...]] = (
    (b"BZh", "bzip2 is not supported: decompress it (bunzip2)"),
    (b"\xfd7zXZ\x00", "xz is not supported: decompress it (unxz)"),
    (b"PK\x03\x04", "zip archives are not supported: unpack it"),
    (b"\x00\x00\xfe\xff", "the file is UTF-32: convert it to UTF-8 (iconv -t UTF-8)"),
    (b"\xff\xfe", "the file is UTF-16 or UTF-32: convert it to UTF-8 (iconv -t UTF-8)"),
    (b"\xfe\xff", "the file is UTF-16: convert it to UTF-8 (iconv -t UTF-8)"),
)


class Kind(StrEnum):
    """What a file is, apart from its compression."""

    JSONL = "JSONL"
    JSON_ARRAY = "JSON array"
    PARQUET = "Parquet"
    ARROW = "Arrow"


def skip_none(index: int) -> bool:
    return False


@dataclass(kw_only=True)
class Container:
    """An open input file."""

    kind: Kind
    path: str
    blocks: BlockFile
    stream: io.BufferedReader[Any]
    is_compressed: bool
    stack: ExitStack  # ends with the container's use

    @property
    def is_read_at_random(self) -> bool:
        """Whether reading rows seeks in the file itself, and so does not record all its digests."""
        return self.kind in (Kind.PARQUET, Kind.ARROW) and not self.is_compressed

    @cached_property
    def _columns_place(self) -> Place:
        """Where the bytes of a column format lie, which is read at random."""
        if not self.is_compressed:
            return self.blocks
        copy = self.stack.enter_context(tempfile.NamedTemporaryFile(prefix="prompts-"))
        while data := self.stream.read(CHUNK_BYTES):
            try:
                copy.write(data)
                copy.flush()
            except OSError as exc:
                raise InputError(
                    f"{self.path}: cannot be unpacked to {tempfile.gettempdir()} ({exc}): free "
                    "space there, name another place with TMPDIR, or decompress the file"
                ) from exc
        return copy.name

    def rows(self, skip: Callable[[int], bool] = skip_none) -> Iterator[NumberedRow]:
        """Yield each row's number from 1 (in JSONL, the line) and its JSON; can be called once.

        The JSON is None if `skip` is true for the row's index, which counts from 0, and `OVERSIZED`
        if the row has too many bytes. Raises `InputError` if the file cannot be read further.
        """
        with explained(self.path):
            match self.kind:
                case Kind.JSONL:
                    yield from _lines(self.stream, skip)
                case Kind.JSON_ARRAY:
                    yield from _elements(self.stream, self.path, skip)
                case Kind.PARQUET:
                    yield from parquet_rows(self._columns_place, self.path, skip)
                case Kind.ARROW:
                    yield from arrow_rows(self._columns_place, self.path, skip)

    def count_rows(self) -> int:
        """How many rows there are; `rows` cannot be called afterwards."""
        if self.kind is Kind.PARQUET:
            with explained(self.path):
                return parquet_num_rows(self._columns_place, self.path)
        return sum(1 for _ in self.rows(lambda index: True))


@contextmanager
def open_container(
    path: str, digests: bytes | None = None
) -> Iterator[tuple[Container, BlockFile]]:
    """Open a prompt file: its container, and the blocks that it is read from.

    The blocks record their digests or, if `digests` is given, are checked against them. Raises
    `InputError`.
    """
    with _open(path) as file, ExitStack() as stack:
        blocks = BlockFile(file, path, digests)
        with explained(path):
            outer = io.BufferedReader(blocks, CHUNK_BYTES)
            stream = decompressed(outer, path)
            container = Container(
                kind=_kind(stream, path),
                path=path,
                blocks=blocks,
                stream=stream,
                is_compressed=stream is not outer,
                stack=stack,
            )
        yield container, blocks


def _kind(stream: io.BufferedReader[Any], path: str) -> Kind:
    start = stream.peek(CHUNK_BYTES)
    if start.startswith(PARQUET_MAGIC):
        return Kind.PARQUET
    if start.startswith(ARROW_MAGICS):
        return Kind.ARROW
    if start.startswith((GZIP_MAGIC, ZSTD_MAGIC)):
        raise InputError(f"{path}: compressed twice: decompress it once")
    for magic, remedy in FOREIGN_MAGIC:
        if start.startswith(magic):
            raise InputError(f"{path}: neither JSON nor Parquet: {remedy}")
    if b"\0" in start[:4]:  # in no text that begins as JSON does, or as CSV
        raise InputError(
            f"{path}: neither JSON nor Parquet: binary, or UTF-16 without its mark: convert it to "
            "UTF-8 (iconv -f UTF-16LE -t UTF-8)"
        )
    if start.startswith(UTF8_BOM):
        stream.read(len(UTF8_BOM))
        start = start[len(UTF8_BOM) :]
    return Kind.JSON_ARRAY if start.lstrip().startswith(b"[") else Kind.JSONL


def _lines(stream: io.BufferedReader[Any], skip: Callable[[int], bool]) -> Iterator[NumberedRow]:
    index = number = num_blank = 0
    while line := stream.readline(token_bound.MAX_ROW_BYTES + 1):
        number += 1
        has_row = not is_blank(line)
        if len(line) > token_bound.MAX_ROW_BYTES and not line.endswith(b"\n"):
            line = token_bound.OVERSIZED
            while rest := stream.readline(CHUNK_BYTES):
                has_row = has_row or not rest.isspace()
                if rest.endswith(b"\n"):
                    break
        if not has_row:
            num_blank += 1
            if num_blank > MANY_BLANK_LINES:
                number += _pass_blank_lines(stream)
            continue
        num_blank = 0
        yield number, None if skip(index) else line
        index += 1


def is_blank(line: bytes) -> bool:
    """Whether a line is blank, so that it is not a row."""
    return line.isspace()


def _pass_blank_lines(stream: io.BufferedReader[Any]) -> int:
    """Skip the blank lines that are completely buffered; return their number."""
    start = stream.peek(CHUNK_BYTES)
    blank = start[: len(start) - len(start.lstrip())]
    return stream.read(blank.rfind(b"\n") + 1).count(b"\n")


def _elements(
    stream: io.BufferedReader[Any], path: str, skip: Callable[[int], bool]
) -> Iterator[NumberedRow]:
    number = 0
    try:
        for element in array_elements(stream, CHUNK_BYTES):
            number += 1
            yield number, None if skip(number - 1) else element
    except ArrayFault as exc:
        raise InputError(
            f"{path}: a JSON array, but it cannot be read beyond its element {number}: {exc}"
        ) from exc


def _open(path: str) -> BinaryIO:
    try:
        return open_regular(path)
    except IsADirectoryError as exc:
        raise InputError(f"{path}: is a directory: name the files in it") from exc
    except FileNotFoundError as exc:
        raise InputError(f"{path}: no such file: check the path") from exc
    except NotRegular as exc:
        raise InputError(
            f"{path}: not a regular file, and it is read twice: save it to a file first, "
            "or pipe it in and name it -"
        ) from exc
    except (OSError, ValueError) as exc:  # ValueError: a NUL in the path
        raise InputError(
            f"{path}: cannot be opened ({exc}): check the path and its rights"
        ) from exc

"""Input files -> numbered rows of JSON. Knows how many rows there are, not what is in them."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from prompts.compression import explained
from prompts.formats import open_container, skip_none
from prompts.types import InputError, RowOrigin


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """One input file as `scan_inputs` found it."""

    path: str  # as it was given
    size_bytes: int
    digest: str  # XXH3-128 of the content as it lies on the disk, 32 hexadecimal digits
    num_rows: int  # at least 1; where rows are expanded, what they expand to
    block_digests: bytes = field(repr=False)  # to check later reads: see `prompts.blocks`


@dataclass(frozen=True, kw_only=True, slots=True)
class RawRow:
    """One row, not parsed yet; or one of the parts that it expands to."""

    ordinal: int  # position among the rows (or parts) of all files, from 0
    origin: RowOrigin
    data: bytes  # JSON


#: How many prompts a row's JSON is to give, at least 1.
CountParts = Callable[[bytes], int]


def scan_inputs(
    paths: Iterable[str | Path], *, count_parts: CountParts | None = None
) -> tuple[InputFile, ...]:
    """Digests and counts each file, in the order given, in constant memory.

    Raises `InputError` for a file that cannot be read, before any row of any file is used.
    """
    return tuple(_scan(os.fspath(path), count_parts) for path in paths)


def read_rows(
    files: Iterable[InputFile],
    *,
    skip: Callable[[int], bool] = skip_none,
    count_parts: CountParts | None = None,
) -> Generator[RawRow]:
    """Yields the rows of scanned files in order, except those for whose ordinal `skip` is true.

    Raises `InputError` if a file cannot be read or has changed, before it yields a changed row.
    """
    ordinal = 0
    for file in files:
        end = ordinal + file.num_rows
        for row in _read(file, ordinal, skip, count_parts):
            ordinal += 1
            if ordinal > end:
                break
            if row is not None:
                yield row
        if ordinal != end:  # although the bytes are the same
            raise InputError(
                f"{file.path}: {file.num_rows} rows were counted and others read: was a package "
                "that reads it replaced meanwhile? Run the same command again"
            )


def _read(
    file: InputFile, first: int, skip: Callable[[int], bool], count_parts: CountParts | None
) -> Iterator[RawRow | None]:
    with open_container(file.path, file.block_digests) as (container, _):
        # A row's parts have ordinals of their own, and are counted before any is skipped.
        skip_row = skip_none if count_parts else lambda index: skip(first + index)
        ordinal = first
        for line, data in container.rows(skip_row):
            parts = (None,) if count_parts is None or data is None else range(count_parts(data))
            for part in parts:
                origin = RowOrigin(source=file.path, line=line, part=part)
                if data is None or (count_parts is not None and skip(ordinal)):
                    yield None
                else:
                    yield RawRow(ordinal=ordinal, origin=origin, data=data)
                ordinal += 1


def _scan(path: str, count_parts: CountParts | None) -> InputFile:
    with open_container(path) as (container, blocks):
        if container.is_read_at_random:  # record all digests before the rows are counted
            with explained(path):
                blocks.drain()
        if count_parts is None:
            num_rows = container.count_rows()
        else:
            num_rows = sum(count_parts(data) for _, data in container.rows() if data is not None)
        with explained(path):
            digest = blocks.drain()
        if not num_rows:
            raise InputError(f"{path}: no rows: give a file with one JSON object on each line")
        return InputFile(
            path=path,
            size_bytes=blocks.size_bytes,
            digest=digest,
            num_rows=num_rows,
            block_digests=blocks.digests,
        )

"""Rows of Parquet and Arrow files, as JSON. The only importer of pyarrow (extra `parquet`)."""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import orjson

from prompts import token_bound
from prompts.compression import missing_extra
from prompts.types import InputError

#: Rows turned into Python objects at a time.
BATCH_ROWS: Final = 64
#: Maximum bytes of those rows, unless a single row is larger.
BATCH_BYTES: Final = 1 << 28
#: Read from a column of a row group at a time.
BUFFER_BYTES: Final = 1 << 20
#: Of a smaller Parquet file, columns are read at once: no more can be read than there is, while a
#: buffer grows to the 2 GiB that a damaged page may claim to have.
SMALL_BYTES: Final = 64 << 20
ARROW_FILE_MAGIC: Final = b"ARROW1"
#: Of what an error says.
MAX_COMPLAINT: Final = 160
#: A batch of more rows than this has at least one bit for each, or it is damaged.
MAX_ROWS_OF_NOTHING: Final = 1 << 16

#: (number from 1, row as JSON, or None where `skip` says yes to its index)
NumberedRow = tuple[int, bytes | None]


#: A source of a file's bytes: its path, or an open seekable file.
Place = str | io.RawIOBase


def _imported(module: str, name: str) -> Any:
    """Import a module of pyarrow. Raises `InputError`, which names the file `name`."""
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise missing_extra(name, "parquet", "pyarrow", exc) from exc


@contextmanager
def _damage_explained(name: str) -> Iterator[None]:
    """What pyarrow raises for damaged files, besides its own errors, as an `InputError`."""
    try:
        yield
    except (MemoryError, OverflowError, SystemError, UnicodeError) as exc:
        line = str(exc).partition("\n")[0][:MAX_COMPLAINT]
        raise InputError(
            f"{name}: damaged ({type(exc).__name__}: {line}): copy the file again"
        ) from exc


def parquet_rows(place: Place, name: str, skip: Callable[[int], bool]) -> Iterator[NumberedRow]:
    """The rows of a Parquet file; row groups whose rows are all skipped are not even read.

    `name`: the file's name in messages.
    """
    pq = _imported("pyarrow.parquet", name)
    # Pre-buffered, a row group (often the whole file) is read into memory at once.
    buffer_bytes = 0 if _size_of(place) <= SMALL_BYTES else BUFFER_BYTES
    with (
        _damage_explained(name),
        pq.ParquetFile(place, pre_buffer=False, buffer_size=buffer_bytes) as file,
    ):
        index = 0
        for group in range(file.num_row_groups):
            num_rows = file.metadata.row_group(group).num_rows
            if all(map(skip, range(index, index + num_rows))):
                for _ in range(num_rows):
                    index += 1
                    yield index, None
                continue
            batch_rows = _rows_at_a_time(file.metadata.row_group(group))
            for batch in file.iter_batches(batch_size=batch_rows, row_groups=[group]):
                batch.validate(full=True)
                yield from _batch_rows(batch, index, skip)
                index += batch.num_rows


def _size_of(place: Place) -> int:
    if isinstance(place, str):
        return os.path.getsize(place)
    size_bytes: int = place.seek(0, os.SEEK_END)
    return size_bytes


def _rows_at_a_time(group: Any) -> int:
    """The number of rows of a row group to convert at a time, within `BATCH_BYTES`.

    Any row may be as large as the whole group, since a value that is stored once may be repeated in
    every row.
    """
    # Not by column: asking for one that is damaged ends the process.
    group_bytes: int = group.total_byte_size
    return max(1, min(BATCH_ROWS, BATCH_BYTES // max(1, group_bytes)))


def parquet_num_rows(place: Place, name: str) -> int:
    """As the file's own footer tells."""
    pq = _imported("pyarrow.parquet", name)
    with _damage_explained(name):
        num_rows: int = pq.read_metadata(place).num_rows
        return num_rows


def arrow_rows(place: Place, name: str, skip: Callable[[int], bool]) -> Iterator[NumberedRow]:
    """The rows of an Arrow file, as Hugging Face's datasets write them (stream or file format)."""
    pa = _imported("pyarrow", name)
    with _damage_explained(name), _opened(pa, place) as source:
        source.seek(0)
        is_file = source.read(len(ARROW_FILE_MAGIC)) == ARROW_FILE_MAGIC
        source.seek(0)
        index = 0
        for batch in _arrow_batches(pa, source, is_file):
            # Nothing checks offsets and lengths on the way; a wrong one reads beyond the memory.
            batch.validate(full=True)
            num_bits = 8 * batch.get_total_buffer_size()
            if batch.num_rows > max(num_bits, MAX_ROWS_OF_NOTHING):
                raise InputError(f"{name}: damaged ({batch.num_rows} rows of nothing)")
            for start in range(0, batch.num_rows, BATCH_ROWS):
                part = batch.slice(start, BATCH_ROWS)
                yield from _batch_rows(part, index, skip)
                index += part.num_rows


def _opened(pa: Any, place: Place) -> Any:
    if isinstance(place, str):
        return pa.OSFile(place)
    return pa.PythonFile(io.BufferedReader(place, BUFFER_BYTES))


def _arrow_batches(pa: Any, source: Any, is_file: bool) -> Iterator[Any]:
    if not is_file:
        with pa.ipc.open_stream(source) as reader:
            yield from reader
        return
    with pa.ipc.open_file(source) as reader:
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)


def _batch_rows(batch: Any, index: int, skip: Callable[[int], bool]) -> Iterator[NumberedRow]:
    skipped = [skip(index + offset) for offset in range(batch.num_rows)]
    is_small = _size_bytes(batch) <= token_bound.MAX_ROW_BYTES
    rows = batch.to_pylist() if is_small and not all(skipped) else []
    for offset, is_skipped in enumerate(skipped):
        data = None
        if not is_skipped:
            data = _as_json(rows[offset]) if is_small else _row_as_json(batch.slice(offset, 1))
        yield index + offset + 1, data


def _size_bytes(batch: Any) -> int:
    """An upper bound for the batch as Python objects, without the overhead of each object."""
    return sum(
        column.dictionary.nbytes * len(column) if hasattr(column, "dictionary") else column.nbytes
        for column in batch.columns
    )


def _row_as_json(row: Any) -> bytes:
    """Serialise `row`, a batch of one row."""
    columns = (
        column.dictionary_decode() if hasattr(column, "dictionary") else column
        for column in row.columns
    )
    if sum(column.nbytes for column in columns) > token_bound.MAX_ROW_BYTES:
        return token_bound.OVERSIZED
    return _as_json(row.to_pylist()[0])


def _as_json(row: object) -> bytes:
    data = orjson.dumps(row, default=_placeholder)
    return token_bound.OVERSIZED if len(data) > token_bound.MAX_ROW_BYTES else data


def _placeholder(value: object) -> str:
    # Such as an image's bytes. A field that we read must be text, so this is refused where it
    # matters and ignored where it does not.
    return f"<{type(value).__name__}>"

"""Rows of Parquet and Arrow files, as JSON. The only importer of pyarrow (extra `parquet`)."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Iterator
from typing import Any, Final

import orjson

from prompts import token_bound
from prompts.compression import missing_extra

#: Rows turned into Python objects at a time.
BATCH_ROWS: Final = 64
#: Maximum bytes of those rows, unless a single row is larger.
BATCH_BYTES: Final = 1 << 28
#: Read from a column of a row group at a time.
BUFFER_BYTES: Final = 1 << 20
ARROW_FILE_MAGIC: Final = b"ARROW1"

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


def parquet_rows(place: Place, name: str, skip: Callable[[int], bool]) -> Iterator[NumberedRow]:
    """The rows of a Parquet file; row groups whose rows are all skipped are not even read.

    `name`: the file's name in messages.
    """
    pq = _imported("pyarrow.parquet", name)
    # Without these two, a row group (often the whole file) is read into memory at once.
    with pq.ParquetFile(place, pre_buffer=False, buffer_size=BUFFER_BYTES) as file:
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
                yield from _batch_rows(batch, index, skip)
                index += batch.num_rows


def _rows_at_a_time(group: Any) -> int:
    """The number of rows of a row group to convert at a time, within `BATCH_BYTES`.

    Any row may be as large as the whole column, since a value that is stored once may be repeated
    in every row.
    """
    columns = (group.column(number) for number in range(group.num_columns))
    largest = max((column.total_uncompressed_size for column in columns), default=0)
    return max(1, min(BATCH_ROWS, BATCH_BYTES // max(1, largest)))


def parquet_num_rows(place: Place, name: str) -> int:
    """As the file's own footer tells."""
    pq = _imported("pyarrow.parquet", name)
    return int(pq.read_metadata(place).num_rows)


def arrow_rows(place: Place, name: str, skip: Callable[[int], bool]) -> Iterator[NumberedRow]:
    """The rows of an Arrow file, as Hugging Face's datasets write them (stream or file format)."""
    pa = _imported("pyarrow", name)
    with _opened(pa, place) as source:
        source.seek(0)
        is_file = source.read(len(ARROW_FILE_MAGIC)) == ARROW_FILE_MAGIC
        source.seek(0)
        index = 0
        for batch in _arrow_batches(pa, source, is_file):
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

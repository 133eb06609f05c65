"""Rows of Parquet and Arrow files, as JSON. The only importer of pyarrow (extra `parquet`)."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any, Final

import orjson

from prompts.compression import missing_extra

#: Rows turned into Python objects at a time.
BATCH_ROWS: Final = 64
#: Read from a column of a row group at a time.
BUFFER_BYTES: Final = 1 << 20
ARROW_FILE_MAGIC: Final = b"ARROW1"

#: (number from 1, row as JSON, or None where `skip` says yes to its index)
NumberedRow = tuple[int, bytes | None]


#: Where the bytes of a file lie: its path, or an open file that can seek.
Place = str | io.RawIOBase


def parquet_rows(place: Place, name: str, skip: Callable[[int], bool]) -> Iterator[NumberedRow]:
    """The rows of a Parquet file; row groups whose rows are all skipped are not even read.

    `name`: what to call it in messages.
    """
    try:
        import pyarrow.parquet as pq
    except ImportError as exc:
        raise missing_extra(name, "parquet", "pyarrow", exc) from exc

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
            for batch in file.iter_batches(batch_size=BATCH_ROWS, row_groups=[group]):
                yield from _batch_rows(batch, index, skip)
                index += batch.num_rows


def parquet_num_rows(place: Place, name: str) -> int:
    """As the file's own footer tells."""
    try:
        import pyarrow.parquet as pq
    except ImportError as exc:
        raise missing_extra(name, "parquet", "pyarrow", exc) from exc
    return int(pq.read_metadata(place).num_rows)


def arrow_rows(place: Place, name: str, skip: Callable[[int], bool]) -> Iterator[NumberedRow]:
    """The rows of an Arrow file, as Hugging Face's datasets write them (stream or file format)."""
    try:
        import pyarrow as pa
    except ImportError as exc:
        raise missing_extra(name, "parquet", "pyarrow", exc) from exc

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
    rows = [] if all(skipped) else batch.to_pylist()
    for offset, is_skipped in enumerate(skipped):
        data = None if is_skipped else orjson.dumps(rows[offset], default=_placeholder)
        yield index + offset + 1, data


def _placeholder(value: object) -> str:
    # Such as an image's bytes. A field that we read must be text, so this is refused where it
    # matters and ignored where it does not.
    return f"<{type(value).__name__}>"

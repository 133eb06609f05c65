"""Writes the same rows as a prompt file of each format."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import orjson
import pytest

from prompts.formats import skip_none
from prompts.inputs import InputFile
from prompts.render import Renderer
from prompts.stream import raw_rows
from prompts.types import BadRow, Prompt

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def as_jsonl(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(orjson.dumps(row) + b"\n" for row in rows)


def as_array(rows: list[dict[str, Any]]) -> bytes:
    return orjson.dumps(rows)


def as_pretty_array(rows: list[dict[str, Any]]) -> bytes:
    return b"\xef\xbb\xbf\n" + json.dumps(rows, indent=2).encode()


def as_parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=70)
    return sink.getvalue()


def as_arrow_stream(rows: list[dict[str, Any]]) -> bytes:
    table = pa.Table.from_pylist(rows)
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=90)
    return sink.getvalue()


def as_arrow_file(rows: list[dict[str, Any]]) -> bytes:
    table = pa.Table.from_pylist(rows)
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=90)
    return sink.getvalue()


FORMS = [as_jsonl, as_array, as_pretty_array, as_parquet, as_arrow_stream, as_arrow_file]


def read_prompts(
    files: Iterable[InputFile], renderer: Renderer, *, skip: Callable[[int], bool] = skip_none
) -> Iterator[Prompt | BadRow]:
    """All rows but the skipped ones, rendered in this process."""
    for row in raw_rows(files, renderer.options, skip=skip):
        yield renderer.prompt_from(row)

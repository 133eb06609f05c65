"""The first rows of a file: whether it is a file of rows at all, before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import orjson

from prompts.dialects import MAX_NAMES, decode_row
from prompts.formats import Kind, open_container
from prompts.reading_options import ReadingOptions
from prompts.token_bound import OVERSIZED, parse_json
from prompts.types import InputError, RowError, RowReason

#: A file whose first rows are all no JSON objects is something else.
NUM_ROWS = 10


def require_rows(path: str) -> None:
    """Raises `InputError`, saying what the file looks like, where no first row is an object."""
    with open_container(path) as (container, _):
        if container.kind in (Kind.PARQUET, Kind.ARROW):
            return  # its rows are objects by their nature
        first: tuple[bytes, RowError] | None = None
        for _, data in islice(container.rows(), NUM_ROWS):
            assert data is not None
            if data == OVERSIZED:
                return  # its format is unknown; the row fails when it is read
            try:
                decode_row(data)
            except RowError as exc:
                first = first or (data, exc)
            else:
                return
        if first is None:
            return  # no row at all, which the scan refuses
        looks = _looks(container.kind, *first)
        raise InputError(f"{path}: its first rows are no JSON objects: {looks}")


def require_fields(path: str, options: ReadingOptions) -> None:
    """Raises `InputError` where no row of the file has the columns that `--field` names."""
    absent, found = _absent([path], options.fields)
    if absent:
        raise InputError(f"{path}: --field {absent}: no row has such a column; found: {found}")


def require_ignored(paths: Sequence[str], options: ReadingOptions) -> None:
    """Raises `InputError` where no row has the columns (or keys) that `--ignore-column` names.

    A file may lack a column that another has.
    """
    absent, found = _absent(paths, options.ignored_columns, within_columns=True)
    if absent:
        where = paths[0] if len(paths) == 1 else f"{len(paths)} files"
        raise InputError(
            f"{where}: --ignore-column {absent}: no row has such a column or key; found: {found}"
        )


def _absent(
    paths: Sequence[str], wanted: Iterable[str], *, within_columns: bool = False
) -> tuple[str, str]:
    """The wanted names that no row of the files has, and columns of the first rows, as text.

    The first is empty when all are found, and then no more rows are read. `within_columns`: keys
    of objects in columns count as well.
    """
    missing = set(wanted)
    names: dict[str, None] = {}
    for path in paths:
        if not missing:
            break
        with open_container(path) as (container, _):
            for _, data in container.rows():
                if not missing:
                    break
                assert data is not None
                try:
                    row = decode_row(data)
                except RowError:
                    continue
                missing -= row.keys()
                if missing and within_columns:
                    missing.difference_update(_keys(row))
                if len(names) < NUM_ROWS:
                    names |= dict.fromkeys(name[:40] for name in islice(row, MAX_NAMES))
    return " and ".join(sorted(missing)), ", ".join(names) or "none"


def _keys(value: object) -> Iterator[str]:
    """The keys of all objects within a value, also of those that a string holds as JSON."""
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        try:
            value = parse_json(value)
        except (orjson.JSONDecodeError, RowError):
            return
        if isinstance(value, str):
            return
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            if isinstance(inner, str | dict | list):
                yield from _keys(inner)


def _looks(kind: Kind, data: bytes, error: RowError) -> str:
    start = data.lstrip()
    if (
        kind is not Kind.JSONL
        or start.startswith((b'"', b"["))
        or error.reason is RowReason.NOT_AN_OBJECT
    ):
        return error.detail
    if b"\r" in data.strip():
        return "it looks like lines that end in a carriage return alone: tr '\\r' '\\n'"
    try:
        data.decode()
    except UnicodeDecodeError:
        return "it is not UTF-8: convert it (iconv -t UTF-8)"
    if start.startswith(b"{"):
        if start.strip() == b"{":
            return "it looks like objects over several lines: jq -c . makes a line of each"
        return error.detail
    if b"," in data or b"\t" in data:
        return "it looks like CSV: convert it to JSONL or Parquet"
    return "it looks like plain text: give a file with one JSON object on each line"

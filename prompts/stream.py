"""All rows of all input files, or the parts that they expand to."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable

from prompts.dialects import count_parts
from prompts.formats import skip_none
from prompts.inputs import CountParts, InputFile, RawRow, read_rows
from prompts.reading_options import ReadingOptions, Thinking


def parts_counter(options: ReadingOptions) -> CountParts | None:
    """How rows are to be counted where one may give several prompts; None where one gives one."""
    if options.thinking is not Thinking.EXPAND:
        return None
    return lambda data: count_parts(data, options)


def raw_rows(
    files: Iterable[InputFile],
    options: ReadingOptions,
    *,
    skip: Callable[[int], bool] = skip_none,
) -> Generator[RawRow]:
    """The rows, or the parts that they expand to, as `options` ask for. Raises `InputError`."""
    return read_rows(files, skip=skip, count_parts=parts_counter(options))

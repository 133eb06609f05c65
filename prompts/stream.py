"""All rows of all input files, as prompts, in this process."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator

from prompts.dialects import count_parts
from prompts.formats import skip_none
from prompts.inputs import CountParts, InputFile, RawRow, read_rows
from prompts.reading_options import ReadingOptions, Thinking
from prompts.render import Renderer
from prompts.types import BadRow, Prompt


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


def read_prompts(
    files: Iterable[InputFile],
    renderer: Renderer,
    *,
    skip: Callable[[int], bool] = skip_none,
) -> Iterator[Prompt | BadRow]:
    """Yields each row of the scanned files once, in order, unless `skip` says yes to its ordinal.

    A skipped row is counted but neither parsed nor tokenised, so a resumed run pays little for what
    is done. Memory does not grow with the number of rows. Raises `InputError` as `read_rows` does.
    """
    for row in raw_rows(files, renderer.options, skip=skip):
        yield renderer.prompt_from(row)

"""All rows of all input files, as prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prompts.inputs import InputFile, read_rows
from prompts.render import Renderer
from prompts.types import BadRow, Prompt


def _skip_none(ordinal: int) -> bool:
    return False


def read_prompts(
    files: Iterable[InputFile],
    renderer: Renderer,
    *,
    skip: Callable[[int], bool] = _skip_none,
) -> Iterator[Prompt | BadRow]:
    """Yields each row of the scanned files once, in order, unless `skip` says no to its ordinal.

    A skipped row is counted but neither parsed nor tokenised, so a resumed run pays little for what
    is done. Memory does not grow with the number of rows. Raises `InputError` as `read_rows` does.
    """
    for row in read_rows(files):
        if not skip(row.ordinal):
            yield renderer.prompt_from(row)

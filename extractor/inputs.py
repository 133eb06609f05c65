"""Edge: what `PROMPTS` on the command line names, as scanned files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from prompts.inputs import InputFile, scan_inputs
from prompts.options import ReadingOptions
from prompts.paths import STDIN, find_files, spool
from prompts.stream import parts_counter

#: What came in on standard input, kept where a run that goes on finds it.
STDIN_NAME = "stdin"


def scan_prompts(
    words: Sequence[Path], reading: ReadingOptions, *, spool_directory: Path
) -> tuple[InputFile, ...]:
    """The files that `words` name; `-` is standard input, kept in `spool_directory`, which exists.

    Raises InputError.
    """
    paths = list(map(str, words))
    if STDIN in paths:
        kept = spool_directory / STDIN_NAME
        spool(sys.stdin.buffer, kept)
        paths = [str(kept) if path == STDIN else path for path in paths]
    return scan_inputs(find_files(paths), count_parts=parts_counter(reading))


def reads_stdin(words: Sequence[Path]) -> bool:
    """Whether standard input is among them."""
    return any(str(word) == STDIN for word in words)

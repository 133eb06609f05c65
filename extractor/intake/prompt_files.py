"""Edge: what `PROMPTS` on the command line names, as scanned files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from prompts.inputs import InputFile, scan_inputs
from prompts.paths import STDIN, Spool, find_files
from prompts.reading_options import ReadingOptions
from prompts.sniff import require_fields, require_ignored, require_rows
from prompts.stream import parts_counter
from prompts.types import InputError


def scan_prompts(
    words: Sequence[Path], reading: ReadingOptions, *, spool: Spool
) -> tuple[InputFile, ...]:
    """The files that `words` name; `-` is standard input, kept in `spool`. Raises InputError."""
    was_kept = spool.exists()
    paths = list(map(str, words))
    if STDIN in paths:
        spool.keep(sys.stdin.buffer)
        paths = [str(spool.path) if path == STDIN else path for path in paths]
    try:
        found = find_files(paths)
        for path in found:
            require_rows(path)
        if found and reading.fields:
            require_fields(found[0], reading)
        if found and reading.ignored_columns:
            require_ignored(found, reading)
        return scan_inputs(found, count_parts=parts_counter(reading))
    except InputError:
        if STDIN in map(str, words) and not was_kept:
            spool.remove()  # else the next, mended, would be refused as another
        raise


def reads_stdin(words: Sequence[Path]) -> bool:
    """Whether standard input is among them."""
    return any(str(word) == STDIN for word in words)

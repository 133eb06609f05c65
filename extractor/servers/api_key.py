"""Edge: the API key of the servers, from a file or a variable: never from an argument, which every
user of the machine can read."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from extractor.core.errors import UsageError
from prompts.regular_file import NotRegular, open_regular

API_KEY_VARIABLE: Final = "EXTRACTOR_API_KEY"
MAX_KEY_BYTES: Final = 4096


@dataclass(frozen=True, kw_only=True)
class ApiKey:
    """A key, and where it came from."""

    value: str = field(repr=False)
    origin: str  # for messages


def find_api_key(file: Path | None, *, environ: Mapping[str, str] = os.environ) -> ApiKey | None:
    """The key in the first line of `file`, or else of the variable; None without either.

    Raises UsageError for a file that others than its owner and group can read or change, for one of
    another user, and for a key that no header may hold.
    """
    if file is not None:
        return _checked(_first_line(file), origin=f"--api-key-file {file}")
    value = environ.get(API_KEY_VARIABLE, "")
    return _checked(value, origin=API_KEY_VARIABLE) if value else None


def _checked(value: str, *, origin: str) -> ApiKey:
    if not value:
        raise UsageError(f"{origin} is empty: write the key in its first line")
    if not value.isascii() or not value.isprintable():
        raise UsageError(
            f"{origin} holds a character that is not printable ASCII, such as a line end. Write "
            "the key alone"
        )
    return ApiKey(value=value, origin=origin)


def _first_line(path: Path) -> str:
    try:
        file = open_regular(path)
    except (NotRegular, IsADirectoryError) as error:
        raise UsageError(f"--api-key-file {path} is not a regular file") from error
    except OSError as error:
        raise UsageError(f"--api-key-file {path} cannot be read ({error.strerror})") from error
    with file:
        facts = os.fstat(file.fileno())
        if facts.st_uid not in (0, os.geteuid()):
            raise UsageError(f"--api-key-file {path} belongs to user {facts.st_uid}, not to you")
        if facts.st_mode & 0o027:
            raise UsageError(
                f"--api-key-file {path} has mode {stat.S_IMODE(facts.st_mode):o}: others can read "
                f"or change it. Run: chmod 600 {path}"
            )
        line, end, _ = file.read(MAX_KEY_BYTES + 1).partition(b"\n")
    if not end and len(line) > MAX_KEY_BYTES:
        raise UsageError(f"--api-key-file {path}: its first line is longer than any key")
    return line.decode("latin-1").strip()

"""Types of the values that options take; each refuses what no command can use."""

from __future__ import annotations

import pwd
import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import click

from extractor.core.humanize import parse_bytes
from extractor.core.option import MAX_BYTES, MAX_CONCURRENCY, MAX_COUNT, MAX_SECONDS
from prompts.types import InputError

AUTO = "auto"
#: An empty path is the current directory, an empty name the default: neither is what was meant.
_EMPTY = "is empty: is a shell variable not set?"


class GivenPath(click.Path):
    """A path that is not empty."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail(_EMPTY, param, ctx)
        return super().convert(value, param, ctx)


class Parsed(click.ParamType[Any]):
    """The value that `parse` makes of a text; a ValueError or InputError of it is shown."""

    def __init__(self, name: str, parse: Callable[[Any], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value)
        except (ValueError, InputError) as error:
            self.fail(str(error), param, ctx)


class Address(Parsed):
    """A server's URL. A variable may hold several, separated by blanks or commas."""

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        return [word for word in re.split(r"[\s,]+", rv) if word]


class OneOf(click.Choice[str]):
    """A member of an enum, by its value."""

    def __init__(self, kind: type[StrEnum]) -> None:
        super().__init__([member.value for member in kind])
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self._kind(super().convert(value, param, ctx))


def given_text(value: object) -> str:
    """A text that is not empty."""
    if value == "":
        raise ValueError(_EMPTY)
    return str(value)


def _seconds(value: Any) -> float:
    """A time of at most a year. `inf` and `nan` would be no bound at all."""
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_SECONDS:
        raise ValueError(f"{value!r} is not a number of seconds from 0 to {MAX_SECONDS}")
    return seconds


def _size(value: Any) -> int:
    """An amount such as 4096, 512M or 1.5GiB."""
    if isinstance(value, int):
        return value
    try:
        size = parse_bytes(value)
    except ValueError:
        raise ValueError(f"{value!r} is no size; write it as 4096, 512M or 1.5GiB") from None
    if size > MAX_BYTES:
        raise ValueError(f"{value!r} is more than {MAX_BYTES} bytes")
    return size


def _concurrency(value: Any) -> int | None:
    """A number of requests, or `auto` (None)."""
    if str(value).lower() == AUTO:
        return None
    try:
        number = int(value)
    except ValueError:
        number = 0
    if not 1 <= number <= MAX_CONCURRENCY:
        raise ValueError(f"{value!r} is neither {AUTO} nor a number from 1 to {MAX_CONCURRENCY}")
    return number


def _user_id(value: Any) -> int:
    """The id of a user given by name or id."""
    try:
        user_id = int(value)
    except ValueError:
        try:
            return pwd.getpwnam(value).pw_uid
        except (KeyError, ValueError):
            raise ValueError(f"{value!r} is not a user of this machine") from None
    if not 0 <= user_id <= MAX_COUNT:
        raise ValueError(f"{value!r} is not a user id")
    return user_id


def _verbosity(value: Any) -> int:
    """How often `-v` was given; more than twice counts as twice."""
    try:
        return min(2, max(0, int(value)))
    except ValueError:
        raise ValueError(f"{value!r} is not a number: write 1, or 2 to log each prompt") from None


ADDRESS: Final = Address("url", given_text)
BYTES: Final = Parsed("size", _size)
PATH: Final = GivenPath(path_type=Path)
SECONDS: Final = Parsed("seconds", _seconds)
TEXT: Final = Parsed("text", given_text)
VERBOSITY: Final = Parsed("level", _verbosity)
#: By the name of the field, where neither its type nor the unit in its name says enough.
BY_NAME: Final[Mapping[str, click.ParamType[Any]]] = {
    "urls": ADDRESS,
    "concurrency": Parsed("concurrency", _concurrency),
    "dump_owner": Parsed("user", _user_id),
    "last_kind": click.Choice(["post", "pre", "both"]),
}

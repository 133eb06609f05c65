"""Types of the values that options take; each refuses what no command can use."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import click

from extractor.core.humanize import parse_bytes
from extractor.core.option import MAX_BYTES, MAX_CONCURRENCY, MAX_SECONDS

AUTO = "auto"
#: An empty path is the current directory, an empty name the default: neither is what was meant.
_EMPTY = "is empty: is a shell variable not set?"


class GivenPath(click.Path):
    """A path that is not empty."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail(_EMPTY, param, ctx)
        return super().convert(value, param, ctx)


class Text(click.ParamType[str]):
    """A text that is not empty."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value == "":
            self.fail(_EMPTY, param, ctx)
        return str(value)


class Seconds(click.ParamType[float]):
    """A time of at most a year. `inf` and `nan` would be no bound at all."""

    name = "seconds"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            seconds = float(value)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds <= MAX_SECONDS:
            self.fail(f"{value!r} is not a number of seconds from 0 to {MAX_SECONDS}", param, ctx)
        return seconds


class ByteSize(click.ParamType[int]):
    """An amount such as 4096, 512M or 1.5GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            size = parse_bytes(value)
        except ValueError:
            self.fail(f"{value!r} is no size; write it as 4096, 512M or 1.5GiB", param, ctx)
        if size > MAX_BYTES:
            self.fail(f"{value!r} is more than {MAX_BYTES} bytes", param, ctx)
        return size


class Address(Text):
    """A server's URL. A variable may hold several, separated by blanks or commas."""

    name = "url"

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        return [word for word in re.split(r"[\s,]+", rv) if word]


class Concurrency(click.ParamType[int | None]):
    """A number of requests, or `auto` (None)."""

    name = "concurrency"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | None:
        if value is None or str(value).lower() == AUTO:
            return None
        try:
            number = int(value)
        except ValueError:
            number = 0
        if not 1 <= number <= MAX_CONCURRENCY:
            self.fail(
                f"{value!r} is neither {AUTO} nor a number from 1 to {MAX_CONCURRENCY}", param, ctx
            )
        return number


class Verbosity(click.ParamType[int]):
    """How often `-v` was given; more than twice counts as twice."""

    name = "level"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return min(2, max(0, int(value)))
        except ValueError:
            self.fail(f"{value!r} is not a number: write 1, or 2 to log each prompt", param, ctx)


class OneOf(click.Choice[str]):
    """A member of an enum, by its value."""

    def __init__(self, kind: type[StrEnum]) -> None:
        super().__init__([member.value for member in kind])
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self._kind(super().convert(value, param, ctx))


ADDRESS: Final = Address()
BYTES: Final = ByteSize()
CONCURRENCY: Final = Concurrency()
LAST_KIND: Final = click.Choice(["post", "pre", "both"])
PATH: Final = GivenPath(path_type=Path)
SECONDS: Final = Seconds()
TEXT: Final = Text()

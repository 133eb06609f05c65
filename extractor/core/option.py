"""An option of a command, stated on the field that it sets. Pure.

>>> @dataclass(frozen=True, kw_only=True)
... class Patience:
...     max_attempts: Annotated[int, Option("--max-attempts", "Requests.", least=1, most=9)] = 4
>>> check_options(Patience())
>>> check_options(Patience(max_attempts=0))
Traceback (most recent call last):
extractor.core.errors.UsageError: --max-attempts must be >= 1, is 0

The command line makes its options of the same statements (`extractor.cli.field_options`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from extractor.core.bounds import require_within


@dataclass(frozen=True)
class Option:
    """The name of an option, its help, and the bounds of its value."""

    name: str
    help: str
    least: float | None = None
    most: float | None = None
    metavar: str | None = None
    default: str | None = None  # how help shows it, where the value itself says less


def types_of(kind: type[Any]) -> Mapping[str, tuple[Any, Option | None]]:
    """The type and the option of each field of a dataclass, by name."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: _parts(hints[field.name]) for field in fields(kind)}


def check_options(values: Any) -> None:
    """Raise UsageError where a field of a dataclass is out of the bounds of its option."""
    for name, (_, option) in types_of(type(values)).items():
        if option is not None and option.most is not None:
            require_within(
                option.name, getattr(values, name), least=option.least or 0, most=option.most
            )


def _parts(hint: Any) -> tuple[Any, Option | None]:
    if get_origin(hint) is not Annotated:
        return hint, None
    kind, option = get_args(hint)
    return kind, option

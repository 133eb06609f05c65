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
from typing import Annotated, Any, Final, get_args, get_origin, get_type_hints

from extractor.core.errors import UsageError

# Bounds: more is a slip of the keyboard, or overflows whatever the value is handed to.
MAX_SECONDS: Final = 366 * 86400
MAX_COUNT: Final = (1 << 31) - 1  # tokens, attempts
MAX_BYTES: Final = 1 << 62
MAX_CONCURRENCY: Final = 1 << 16
MAX_MOVERS: Final = 64
MAX_TOKENIZER_WORKERS: Final = 256


@dataclass(frozen=True)
class Option:
    """The name of an option, its help, and the bounds of its value."""

    name: str
    help: str
    least: float = 0
    most: float | None = None  # None: without bounds
    metavar: str | None = None
    default: str | None = None  # how help shows it, where the value itself says less


def types_of(kind: type[Any]) -> Mapping[str, tuple[Any, Option | None]]:
    """The type and the option of each field of a dataclass, by name."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: _parts(hints[field.name]) for field in fields(kind)}


def check_options(values: Any) -> None:
    """Raise UsageError where a field of a dataclass is out of the bounds of its option."""
    for name, (_, option) in types_of(type(values)).items():
        value = getattr(values, name)
        if option is None or option.most is None or value is None:
            continue
        if not value >= option.least:  # NaN is out of any bounds
            raise UsageError(f"{option.name} must be >= {option.least}, is {value}")
        if value > option.most:
            raise UsageError(f"{option.name} must be <= {option.most}, is {value}")


def _parts(hint: Any) -> tuple[Any, Option | None]:
    if get_origin(hint) is not Annotated:
        return hint, None
    kind, option = get_args(hint)
    return kind, option

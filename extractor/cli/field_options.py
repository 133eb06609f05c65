"""Options of a command made from the fields that they set, and the values made from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin

import click

from extractor.cli.option_types import BY_NAME, BYTES, PATH, SECONDS, TEXT, OneOf
from extractor.cli.options import Function
from extractor.core.option import Option, types_of

Value = TypeVar("Value")


def field_options(kind: type[Any], *names: str) -> Callable[[Function], Function]:
    """Add the options of a dataclass, or those of its fields `names`.

    The type of an option follows from that of its field and from the field's name. An option whose
    default is computed, or that was not given, is None.
    """

    def decorate(command: Function) -> Function:
        stated = types_of(kind)
        for field in reversed(fields(kind)):
            hint, option = stated[field.name]
            if option is not None and (not names or field.name in names):
                command = _option(field, hint, option)(command)
        return command

    return decorate


def value_of(kind: type[Value], values: Mapping[str, Any]) -> Value:
    """A dataclass with the values of its options, and of those of the dataclasses within it.

    What was not given has the default of its field.
    """
    given = {}
    for name, (hint, _) in types_of(kind).items():
        if is_dataclass(hint):
            given[name] = value_of(hint, values)  # type: ignore[arg-type]
        elif values.get(name) not in (None, ()):
            given[name] = values[name]
    return kind(**given)


def _option(field: Field[Any], hint: Any, option: Option) -> Callable[[Function], Function]:
    (kind, *_) = [part for part in get_args(hint) or (hint,) if part is not NoneType]
    if kind is bool:
        return click.option(option.name, field.name, is_flag=True, help=option.help)
    is_multiple = get_origin(hint) is tuple
    default = None if field.default is MISSING or is_multiple else field.default
    if isinstance(default, StrEnum):
        default = default.value  # as help shows it
    is_time = field.name.endswith("_s")
    return click.option(
        option.name,
        field.name,
        type=_type(field.name, kind, option),
        multiple=is_multiple,
        default=default,
        show_default=option.default or default is not None,
        metavar="SECONDS" if is_time else option.metavar,
        help=option.help,
    )


def _type(name: str, kind: type, option: Option) -> click.ParamType[Any]:
    if name in BY_NAME:
        return BY_NAME[name]
    if name.endswith("_bytes"):
        return BYTES
    if name.endswith("_s"):
        return SECONDS
    if issubclass(kind, StrEnum):
        return OneOf(kind)
    if kind is int:
        return click.IntRange(int(option.least), int(option.most or 0))
    return PATH if issubclass(kind, Path) else TEXT

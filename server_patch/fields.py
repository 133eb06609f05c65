"""Reads typed fields from another program's JSON; an error names the field and the problem.

Every value that comes from a file or a reply passes through here once, at the border, and is then a
field of a typed record. Standard library only.

A path names a field: its steps are object keys or array indexes.

>>> reply = object_of(b'{"meta_info": {"id": "a", "prompt_tokens": "x", "stop": null}}')
>>> text(reply, "meta_info.id")
'a'
>>> integer(reply, "meta_info.prompt_tokens", minimum=0)
Traceback (most recent call last):
server_patch.fields.FieldError: meta_info.prompt_tokens is 'x', must be an integer
>>> text(reply, "meta_info.version")
Traceback (most recent call last):
server_patch.fields.FieldError: meta_info.version is missing
>>> optional(text, reply, "meta_info.version"), optional(integer, reply, "meta_info.stop")
(None, None)
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

Document = Mapping[str, Any]
P = ParamSpec("P")
T = TypeVar("T")

#: The largest integer that SQLite and numpy hold.
MAX_INTEGER = (1 << 63) - 1
MAX_SHOWN_CHARS = 60
_SURROGATES = re.compile("[\ud800-\udfff]")
_MAX_FLOAT = sys.float_info.max
_MISSING = object()


class FieldError(ValueError):
    """A field is missing or invalid; the message names it."""


def object_of(
    data: bytes, *, what: str = "the answer", loads: Callable[[bytes], object] | None = None
) -> Document:
    """Parse `data` as a JSON object; NaN and infinities are errors. Raises FieldError.

    what: names the document in errors. loads: a faster parser, which raises ValueError.
    """
    try:
        document = (loads or _strict_loads)(data)
    except (ValueError, RecursionError) as error:
        raise FieldError(f"{what} is not JSON") from error
    if not isinstance(document, dict):
        raise FieldError(f"{what} is {_shown(document)}, must be an object")
    return document


def _strict_loads(data: bytes) -> object:
    return json.loads(data, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def text(document: Document, path: str, *, max_chars: int | None = None) -> str:
    """The non-empty string of at most `max_chars` at `path`. Lone surrogates, which JSON may name
    and no file or table holds, are errors."""
    value = _found(document, path)
    if not isinstance(value, str) or not value:
        raise _wrong(path, value, "a string")
    if max_chars is not None and len(value) > max_chars:
        raise _wrong(path, value, f"of at most {max_chars} characters")
    if not value.isascii() and _SURROGATES.search(value):
        raise _wrong(path, value, "Unicode text")
    return value


def integer(
    document: Document, path: str, *, minimum: int = -MAX_INTEGER, maximum: int = MAX_INTEGER
) -> int:
    """The integer in [minimum, maximum] at `path`; 1.0 and true are errors."""
    value = _found(document, path)
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong(path, value, "an integer")
    if value < minimum:
        raise _wrong(path, value, f"{minimum} or more")
    if value > maximum:
        raise _wrong(path, value, f"{maximum} or less")
    return value


def number(
    document: Document, path: str, *, minimum: float = -_MAX_FLOAT, maximum: float = _MAX_FLOAT
) -> float:
    """The number in [minimum, maximum] at `path`, as a float; true is an error."""
    value = _found(document, path)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _wrong(path, value, "a number")
    if not minimum <= value <= maximum:
        raise _wrong(path, value, f"{minimum:g} to {maximum:g}")
    return float(value)


def boolean(document: Document, path: str) -> bool:
    """True or false at `path`."""
    value = _found(document, path)
    if not isinstance(value, bool):
        raise _wrong(path, value, "true or false")
    return value


def mapping(document: Document, path: str) -> Document:
    """The object at `path`."""
    value = _found(document, path)
    if not isinstance(value, dict):
        raise _wrong(path, value, "an object")
    return value


def array(document: Document, path: str) -> Sequence[object]:
    """The array at `path`."""
    value = _found(document, path)
    if not isinstance(value, list):
        raise _wrong(path, value, "an array")
    return value


def optional(
    read: Callable[Concatenate[Document, str, P], T],
    document: Document,
    path: str,
    *args: P.args,
    **kwargs: P.kwargs,
) -> T | None:
    """The result of `read` for a field that may be missing or null; then None."""
    if _find(document, path) in (_MISSING, None):
        return None
    return read(document, path, *args, **kwargs)


def _found(document: Document, path: str) -> object:
    value = _find(document, path)
    if value is _MISSING:
        raise FieldError(f"{path} is missing")
    return value


def _find(document: Document, path: str) -> object:
    """The value at `path`, or `_MISSING`. Raises FieldError for a step into a scalar."""
    value: object = document
    steps = path.split(".")
    for depth, step in enumerate(steps):
        if isinstance(value, dict):
            value = value.get(step, _MISSING)
        elif isinstance(value, list) and step.isdecimal():
            value = value[int(step)] if int(step) < len(value) else _MISSING
        elif value is _MISSING or value is None:
            return _MISSING
        else:
            raise _wrong(".".join(steps[:depth]), value, "an object")
    return value


def _wrong(path: str, value: object, wanted: str) -> FieldError:
    return FieldError(f"{path} is {_shown(value)}, must be {wanted}")


def _shown(value: object) -> str:
    """Format a value for a message: an object or array by its type only, a string shortened.

    >>> _shown(True), _shown("x" * 100), _shown([1])
    ('true', "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...", 'an array')
    """
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an array"
    shown = repr(value) if isinstance(value, str) else json.dumps(value)
    return shown if len(shown) <= MAX_SHOWN_CHARS else shown[: MAX_SHOWN_CHARS - 3] + "..."

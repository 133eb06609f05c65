"""Limits that keep one row from taking the memory or the time of all others. Pure.

Each is checked where the size is first known: bytes before a row is parsed, levels once it is
parsed, turns and tokens before it is rendered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import orjson

from prompts.types import RowError, RowReason

#: Most bytes of one row's JSON. A million tokens, with their ids, their mask and their text, take
#: less than half of it.
MAX_ROW_BYTES: Final = 32 << 20
#: Stands for a row of more bytes, which is not kept in memory. No other row is empty.
OVERSIZED: Final = b""
#: Most levels of a row's JSON, and of JSON in its strings. Schemas of tools have about 20.
MAX_LEVELS: Final = 100
#: Longest prompt where neither a server nor a person says what is too long.
MAX_TOKENS: Final = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBound:
    """The longest prompt that is of use, and what becomes of a longer one."""

    max_tokens: int = MAX_TOKENS
    keeps_beginning: bool = False  # else the row fails


def oversized() -> RowError:
    """The error of a row that is `OVERSIZED`."""
    detail = f"the row has more than {MAX_ROW_BYTES >> 20} MiB: remove columns that are not read"
    return RowError(RowReason.ROW_TOO_LARGE, detail)


def parse_json(data: bytes | str) -> object:
    """`orjson.loads` within `MAX_LEVELS`.

    Raises orjson.JSONDecodeError, and `RowError` (row_too_large) for more levels.
    """
    value = orjson.loads(data)
    if _is_deep(data, value):
        raise RowError(RowReason.ROW_TOO_LARGE, f"nested deeper than {MAX_LEVELS} levels")
    return value


def _is_deep(data: bytes | str, value: object) -> bool:
    if isinstance(data, str):
        num_opened = data.count("[") + data.count("{")
    else:
        num_opened = data.count(b"[") + data.count(b"{")
    if num_opened <= MAX_LEVELS:
        return False  # the common case, cheaply
    level = [value]
    for _ in range(MAX_LEVELS):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)  # type: ignore[attr-defined]
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True

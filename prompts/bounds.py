"""Limits that keep one row from taking the memory or the time of all others. Pure.

Each is checked where the size is first known: bytes before a row is parsed, levels once it is
parsed, turns and tokens before it is rendered.
"""

from __future__ import annotations

from collections.abc import Sequence
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


#: Texts of fewer bytes for each token of the bound are tokenised without being looked at before.
BYTES_PER_TOKEN: Final = 8
#: Longer texts are tokenised only where the bound has as many tokens: each takes some 200 bytes.
MAX_WHOLE_CHARS: Final = 1 << 22
#: Most bytes that the parts of one row may take together, as each of them is parsed again.
MAX_EXPANDED_BYTES: Final = 4 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBound:
    """The longest prompt that is of use, and what becomes of a longer one."""

    max_tokens: int = MAX_TOKENS
    keeps_beginning: bool = False  # else the row fails

    @property
    def too_many(self) -> int:
        """Texts whose pieces give more tokens than these give more than `max_tokens` as a whole.

        A text that is cut gives a few tokens more around each cut; not twice as many in all.
        """
        return 2 * self.max_tokens

    def is_near(self, texts: Sequence[str]) -> bool:
        """Whether the texts are short enough to be tokenised without further ado."""
        if len(texts) > self.max_tokens:
            return False
        most = BYTES_PER_TOKEN * self.max_tokens
        num_chars = sum(map(len, texts))
        if 4 * num_chars <= most:
            return True
        return num_chars <= most and sum(len(text.encode()) for text in texts) <= most


def oversized() -> RowError:
    """The error of a row that is `OVERSIZED`."""
    detail = f"the row has more than {MAX_ROW_BYTES >> 20} MiB: remove columns that are not read"
    return RowError(RowReason.ROW_TOO_LARGE, detail)


def parse_json(data: bytes | str) -> object:
    """`orjson.loads` within `MAX_LEVELS`.

    Raises orjson.JSONDecodeError, and `RowError` (row_too_large) for more levels.
    """
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as exc:
        if "limit" not in exc.msg:  # its own, of 1,024 levels
            raise
    else:
        if not _is_deep(data, value):
            return value
    raise RowError(RowReason.ROW_TOO_LARGE, f"nested deeper than {MAX_LEVELS} levels")


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

"""Limits that keep a single row from exhausting memory or time. Pure.

Each limit is checked as soon as the size is known: bytes before a row is parsed, nesting levels
after it is parsed, turns and tokens before it is rendered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import orjson

from prompts.types import RowError, RowReason

#: Maximum bytes of one row's JSON. A million tokens, with ids, mask and text, take less than half.
MAX_ROW_BYTES: Final = 32 << 20
#: Stands for a larger row, which is not kept in memory. Other rows are never empty.
OVERSIZED: Final = b""
#: Maximum nesting of a row's JSON, and of JSON in its strings. Tool schemas have about 20 levels.
MAX_LEVELS: Final = 100
#: Longest prompt if neither a server nor the user sets a limit.
MAX_TOKENS: Final = 1 << 20


#: Texts of up to this many bytes per token of the bound are tokenised without a check first.
BYTES_PER_TOKEN: Final = 8
#: Longer texts are tokenised whole only up to BYTES_PER_TOKEN characters per token of the bound,
#: since each token takes about 200 bytes.
MAX_WHOLE_CHARS: Final = 1 << 22
#: Maximum total bytes of one row's parts, since the row is parsed again for each part.
MAX_EXPANDED_BYTES: Final = 4 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBound:
    """The longest useful prompt, and the treatment of longer ones."""

    max_tokens: int = MAX_TOKENS
    keeps_beginning: bool = False  # else the row fails
    max_whole_chars: int = MAX_WHOLE_CHARS

    @property
    def too_many(self) -> int:
        """Texts whose pieces give more tokens than this exceed `max_tokens` as a whole.

        Cutting a text into pieces adds a few tokens at each cut, but less than doubles the total.
        """
        return 2 * self.max_tokens

    def is_near(self, texts: Sequence[str]) -> bool:
        """Whether the texts are short enough to be tokenised without a check first."""
        if len(texts) > self.max_tokens:
            return False
        most = BYTES_PER_TOKEN * self.max_tokens
        num_chars = sum(map(len, texts))
        if 4 * num_chars <= most:
            return True
        return num_chars <= most and sum(len(text.encode()) for text in texts) <= most


#: If nothing sets a bound.
NO_BOUND: Final = TokenBound()


def oversized() -> RowError:
    """The error of a row that is `OVERSIZED`."""
    detail = f"the row has more than {MAX_ROW_BYTES >> 20} MiB: remove columns that are not read"
    return RowError(RowReason.ROW_TOO_LARGE, detail)


def parse_json(data: bytes | str) -> object:
    """Parse JSON with at most `MAX_LEVELS` levels of nesting.

    Raises orjson.JSONDecodeError, and `RowError` (row_too_large) for deeper nesting.
    """
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as exc:
        if "limit" not in exc.msg:  # orjson has a limit of its own, 1,024 levels
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
        return False  # a cheap test for the common case
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

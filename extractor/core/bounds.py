"""Bounds that the values of options must keep. Pure.

More is a slip of the keyboard, or overflows whatever the value is handed to.
"""

from __future__ import annotations

from typing import Final

from extractor.core.errors import UsageError

MAX_SECONDS: Final = 366 * 86400
MAX_COUNT: Final = (1 << 31) - 1  # tokens, attempts
MAX_BYTES: Final = 1 << 62
MAX_CONCURRENCY: Final = 1 << 16
MAX_MOVERS: Final = 64
MAX_TOKENIZER_WORKERS: Final = 256


def require_within(option: str, value: float | None, *, least: float, most: float) -> None:
    """Raise UsageError where an option has a value out of its bounds; NaN is out of any."""
    if value is None:
        return
    if not value >= least:
        raise UsageError(f"{option} must be >= {least}, is {value}")
    if value > most:
        raise UsageError(f"{option} must be <= {most}, is {value}")

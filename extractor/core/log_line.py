"""A line of `--log-json`. Pure."""

from __future__ import annotations

from datetime import UTC, datetime

from extractor.core.printable import printable_json


def log_line(message: str, *, event: str = "note", level: str = "info", **fields: object) -> str:
    """One JSON object, without the line's end."""
    line = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "level": level,
        "event": event,
        "message": message,
        **fields,
    }
    return printable_json(line)

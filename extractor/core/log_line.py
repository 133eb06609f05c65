"""A line of `--log-json`. Pure."""

from __future__ import annotations

import json
from datetime import UTC, datetime


def log_line(message: str, *, event: str = "note", level: str = "info", **fields: object) -> str:
    """One JSON object, without the line's end; what JSON does not know is written as text."""
    line = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "level": level,
        "event": event,
        "message": message,
        **fields,
    }
    return json.dumps(line, default=str, ensure_ascii=False, separators=(",", ":"))

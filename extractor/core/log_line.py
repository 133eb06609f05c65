"""A line of `--log-json`. Pure, and imported in no time: Ctrl-C is told in this form as well while
the rest of the command is still being imported."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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


def asks_for_objects(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether `--log-json` is given; told without reading the options, which may be wrong.

    >>> asks_for_objects(["run", "p.jsonl", "--log-json"], {})
    True
    >>> asks_for_objects(["run", "p.jsonl"], {"EXTRACTOR_RUN_LOG_JSON": "1"})
    True
    >>> asks_for_objects(["run", "p.jsonl", "--", "--log-json"], {})  # SGLang's
    False
    """
    ours = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if "run" not in ours:
        return False
    variable = environment.get("EXTRACTOR_RUN_LOG_JSON", "").lower()
    return "--log-json" in ours or variable in ("1", "true", "t", "yes", "y", "on")

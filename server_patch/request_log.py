"""Logs the stages and errors of single requests; every line contains `rid=<rid>`.

The lines are off unless `SGLANG_HS_LOG_LEVEL` is set. Callers ask `debug_enabled` once per
forward or job, not per request.

| level | line |
|---|---|
| DEBUG | rows captured, with the number of the forward; file written |
| WARNING | an error of the request, also stored as an error record |
"""

from __future__ import annotations

import logging
import sys
from typing import Final

logger = logging.getLogger(__name__)

_OFF: Final = logging.CRITICAL + 1
logger.setLevel(_OFF)
#: SGLang's own format; the process is named, since all of them write to one log.
_FORMAT: Final = "[%(asctime)s hidden-states writer %(process)d] %(message)s"


def set_level(level: str | None) -> None:
    """Log lines of `level` and above, whatever the level of SGLang's loggers; None: no lines."""
    logger.setLevel(level or _OFF)


def write_to_stderr() -> None:
    """Write the lines to stderr, in a process that SGLang does not configure."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%Y-%m-%d %H:%M:%S"))
    logger.addHandler(handler)
    logger.propagate = False


def debug_enabled() -> bool:
    """Whether stages of requests are logged."""
    return logger.isEnabledFor(logging.DEBUG)


def captured(rid: str, *, forward: int, start: int, rows: int) -> None:
    """Rows of a request were captured. forward: number of the forward among those with requests of
    ours, from 1."""
    logger.debug(
        "hidden states: rid=%s captured: forward %d, rows %d, start %d", rid, forward, rows, start
    )


def written(rid: str, *, counter: int, start: int, rows: int) -> None:
    """A dump is in place. counter: the number in its name."""
    logger.debug(
        "hidden states: rid=%s written: dump %d, rows %d, start %d", rid, counter, rows, start
    )


def failed(rid: str, *, counter: int, start: int, reason: str) -> None:
    """Rows of a request are lost. counter: the number in the name of the error record."""
    logger.warning(
        "hidden states: rid=%s failed: error record %d, start %d: %s", rid, counter, start, reason
    )

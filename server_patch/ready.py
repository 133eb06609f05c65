"""READY.json and FAILED.json: what a rank captures, or why it captures nothing."""

from __future__ import annotations

import importlib.metadata
import os
from datetime import UTC, datetime
from pathlib import Path

from server_patch.dump_dir import RankDir
from server_patch.dump_format import (
    FAILED_NAME,
    READY_NAME,
    FailedRecord,
    ProcessInfo,
    Ready,
    encode_failed,
    encode_ready,
)

_DISTRIBUTION = "hidden-state-extractor"


def own_process(*, host: str, port: int) -> ProcessInfo:
    """The facts about this process. host, port: where its server listens. Raises OSError."""
    return ProcessInfo(
        pid=os.getpid(),
        start_ticks=own_start_ticks(),
        started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        host=host,
        port=port,
        namespace=os.readlink("/proc/self/ns/pid"),
    )


def write_ready(rank_dir: RankDir, ready: Ready) -> None:
    """Write READY.json. Raises OSError."""
    rank_dir.write(READY_NAME, [encode_ready(ready)])


def write_failed(rank_dir: RankDir, reason: str) -> None:
    """Write FAILED.json and remove READY.json. Raises OSError."""
    rank_dir.directory.unlink(READY_NAME)
    rank_dir.write(FAILED_NAME, [encode_failed(FailedRecord(reason=reason, pid=os.getpid()))])


def own_start_ticks() -> int:
    """Field 22 of /proc/self/stat, in clock ticks since boot."""
    text = Path("/proc/self/stat").read_text()
    # The command name, in parentheses, may hold spaces and parentheses itself.
    fields_from_third = text[text.rindex(")") + 2 :].split()
    return int(fields_from_third[19])


def plugin_version() -> str:
    """The version of the installed distribution."""
    try:
        return importlib.metadata.version(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"  # run from a source folder

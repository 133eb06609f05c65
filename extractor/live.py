"""Edge: `OUT/.live.json`, where a running session tells other processes what the manifest does not
hold: what is in flight, how fast it goes, how long each stage takes.

Written anew every second beside its place and renamed, so that a reader finds one whole document;
never synced, because it is worth nothing after a crash. It names its process as the lock file does,
so that what a killed run left is not taken for a live one's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from extractor.measurements import Counters
from extractor.report import session_document
from extractor.writers import is_same_process, pid_namespace, process_start_ticks

LIVE_NAME = ".live.json"
INTERVAL_S = 1.0
#: From another PID namespace it cannot be seen whether a process lives: older than this is dead.
STALE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Live:
    """What a running session said of itself."""

    pid: int
    age_s: float  # seconds since it was written
    session: dict[str, Any]  # `report.session_document`


class LiveFile:
    """A reporter that keeps `OUT/.live.json`. For the holder of OUT's lock only.

    The disk may be slow or full: a thread writes, one document at a time, and a document that
    could not be written is made up for by the next.
    """

    def __init__(self, out: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = out / LIVE_NAME
        self._clock = clock
        self._next = clock()
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None
        self._process = {
            "pid": os.getpid(),
            "pid_start_ticks": process_start_ticks(os.getpid()),
            "pid_namespace": pid_namespace(),
        }

    def update(self, counters: Counters) -> None:
        if self._clock() < self._next or (self._writing is not None and not self._writing.done()):
            return
        self._next = self._clock() + INTERVAL_S
        document = {
            **self._process,
            "written_at": time.time(),
            "session": session_document(counters),
        }
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="live")
        self._writing = self._thread.submit(self._write, orjson.dumps(document))

    def note(self, message: str, **_: object) -> None:
        pass

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = self._writing = None
            self._next = self._clock()
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _write(self, data: bytes) -> None:
        temporary = self._path.with_name(f"{LIVE_NAME}.tmp")
        with suppress(OSError):
            temporary.write_bytes(data)
            os.replace(temporary, self._path)


def read_live(out: Path) -> Live | None:
    """What the running session last said; None where none is running, or has said anything."""
    try:
        document = orjson.loads((out / LIVE_NAME).read_bytes())
        pid, namespace = int(document["pid"]), str(document["pid_namespace"])
        age_s = max(0.0, time.time() - float(document["written_at"]))
        if not is_same_process(pid, int(document["pid_start_ticks"]), namespace):
            return None
        if namespace != pid_namespace() and age_s > STALE_S:
            return None
        return Live(pid=pid, age_s=age_s, session=dict(document["session"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None

"""Writes and reads `OUT/.live.json`: a running session's figures that the manifest does not hold.

It is renamed into place every second, and never synced: it is worthless after a crash. It names its
process as the lock file does, so that the file of a killed run is not taken for that of a live one.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from extractor.core.counters import Counters, Moment, ServerNow
from extractor.core.timings import DEFAULT_TIMINGS
from extractor.status.report import session_document
from extractor.system.files import read_regular
from extractor.system.process_id import is_same_process, pid_namespace, process_start_ticks

LIVE_NAME = ".live.json"
_MAX_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Live:
    """The last document of a running session."""

    pid: int
    age_s: float  # seconds since it was written
    session: dict[str, Any]  # `report.session_document`


class LiveFile:
    """A reporter that keeps `OUT/.live.json`. For the holder of OUT's lock only.

    A thread writes, as the disk may be slow; the next document replaces one that was not written.
    """

    def __init__(
        self,
        out: Path,
        *,
        interval_s: float = DEFAULT_TIMINGS.status.live_interval_s,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = out / LIVE_NAME
        self._interval_s = interval_s
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
        self._next = self._clock() + self._interval_s
        document = {
            **self._process,
            "written_at": time.time(),
            "session": session_document(counters),
        }
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="live")
        self._writing = self._thread.submit(self._write, orjson.dumps(document))

    def report(self, message: str, **_: object) -> None:
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
    """The last document of the running session; None if none is running or has written one."""
    try:
        document = _read(out / LIVE_NAME)
    except (OSError, ValueError):
        return None
    namespace = document["pid_namespace"]
    age_s = max(0.0, time.time() - document["written_at"])
    if not is_same_process(document["pid"], document["pid_start_ticks"], namespace):
        return None
    if namespace != pid_namespace() and age_s > DEFAULT_TIMINGS.status.stale_s:
        return None  # whether the process lives cannot be seen from here
    return Live(pid=document["pid"], age_s=age_s, session=document["session"])


def live_problem(out: Path) -> str | None:
    """The problem with `.live.json`; None if it is sound, left by a killed run, or missing."""
    path = out / LIVE_NAME
    try:
        _read(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{path}: {error.strerror}"
    except ValueError as error:
        return f"{path} is not what a session writes ({error}); remove it, nothing depends on it"
    return None


def _read(path: Path) -> dict[str, Any]:
    """The document, in the shape that its readers expect. Raises OSError, ValueError."""
    document = orjson.loads(read_regular(path, max_bytes=_MAX_BYTES))
    _require_shape(document, _document_like(), "the document")
    return dict(document)


@functools.cache
def _document_like() -> dict[str, Any]:
    """An example document that has every field."""
    server = ServerNow(url="", is_up=True, in_flight=0, request_limit=0, num_prompts=0)
    session = session_document(Counters(now=Moment(servers=(server,))))
    return {
        "pid": 0, "pid_start_ticks": 0, "pid_namespace": "", "written_at": 0.0, "session": session,
    }  # fmt: skip


def _require_shape(value: object, example: object, name: str) -> None:
    """Raise ValueError if a value or a part of it has not the kind that it has in `example`."""
    if (kind := _kind(example)) is not _kind(value):
        raise ValueError(f"{name} is missing, or is not {kind.__name__}")
    if isinstance(value, dict) and isinstance(example, dict):
        for key, inner in example.items():
            _require_shape(value.get(key), inner, key)
    elif isinstance(value, list) and isinstance(example, list):
        for item in value:
            _require_shape(item, example[0], name)


def _kind(value: object) -> type:
    """The type of a JSON value. Numbers are of one type, except those beyond 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return type(value)
    return float if abs(value) < 2**63 else object

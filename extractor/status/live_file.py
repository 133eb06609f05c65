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
from extractor.system.process_id import is_same_process, pid_namespace, process_start_ticks
from server_patch.directory import Directory
from server_patch.fields import MAX_INTEGER, integer, mapping, number, object_of, text
from server_patch.settings import DEFAULT_FILE_MODE

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
        out: Directory,
        *,
        file_mode: int = DEFAULT_FILE_MODE,
        interval_s: float = DEFAULT_TIMINGS.status.live_interval_s,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out = out
        self._file_mode = file_mode
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
            self._out.unlink(LIVE_NAME)

    def _write(self, data: bytes) -> None:
        with suppress(OSError):
            self._out.write_whole(LIVE_NAME, [data], mode=self._file_mode)


def read_live(out: Path) -> Live | None:
    """The last document of the running session; None if none is running or has written one."""
    try:
        written = _read(out)
    except (OSError, ValueError):
        return None
    age_s = max(0.0, time.time() - written.at)
    if not is_same_process(written.pid, written.pid_start_ticks, written.pid_namespace):
        return None
    if written.pid_namespace != pid_namespace() and age_s > DEFAULT_TIMINGS.status.stale_s:
        return None  # whether the process lives cannot be seen from here
    return Live(pid=written.pid, age_s=age_s, session=written.session)


def live_problem(out: Path) -> str | None:
    """The problem with `.live.json`; None if it is sound, left by a killed run, or missing."""
    path = out / LIVE_NAME
    try:
        _read(out)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{path}: {error.strerror}"
    except ValueError as error:
        return f"{path} is not what a session writes ({error}); remove it, nothing depends on it"
    return None


@dataclass(frozen=True, kw_only=True)
class _LiveDocument:
    """The content of `.live.json`."""

    pid: int
    pid_start_ticks: int
    pid_namespace: str
    at: float  # seconds since the epoch
    session: dict[str, Any]


def _read(out: Path) -> _LiveDocument:
    """Raises OSError, ValueError for a document that is not in the shape that readers expect."""
    with Directory.open(out) as directory:
        data = directory.read(LIVE_NAME, max_bytes=_MAX_BYTES)
    document = object_of(data, what="the document", loads=orjson.loads)
    return _LiveDocument(
        pid=integer(document, "pid", minimum=1),
        pid_start_ticks=integer(document, "pid_start_ticks", minimum=0),
        pid_namespace=text(document, "pid_namespace"),
        at=number(document, "written_at", minimum=0, maximum=MAX_INTEGER),
        session=_shaped(mapping(document, "session"), _session_like(), "session"),
    )


@functools.cache
def _session_like() -> dict[str, Any]:
    """An example session that has every field."""
    server = ServerNow(url="", is_up=True, in_flight=0, request_limit=0, num_prompts=0)
    return session_document(Counters(now=Moment(servers=(server,))))


def _shaped(value: object, example: object, name: str) -> Any:
    """The fields of `value` that `example` has. Raises ValueError if one has not the kind that it
    has there. An empty example holds numbers, by any name."""
    if (kind := _kind(example)) is not _kind(value):
        raise ValueError(f"{name} is missing, or is not {kind.__name__}")
    if isinstance(value, dict) and isinstance(example, dict):
        examples = example or dict.fromkeys(value, 0)
        return {key: _shaped(value.get(key), inner, key) for key, inner in examples.items()}
    if isinstance(value, list) and isinstance(example, list):
        return [_shaped(item, example[0], name) for item in value]
    return value


def _kind(value: object) -> type:
    """The type of a JSON value. Numbers are of one type, except those that no figure has."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return type(value)
    return float if 0 <= value <= MAX_INTEGER else object

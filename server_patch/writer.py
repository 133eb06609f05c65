"""The threads that turn filled slots into dump files and failures into error records."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from server_patch.dump_format import (
    DumpHeader,
    ErrorRecord,
    dump_name,
    encode_error,
    encode_header,
    error_name,
)
from server_patch.files import Buffer, replace, write_whole
from server_patch.layout import Layout
from server_patch.ring import Ring, Slot
from server_patch.staging import Stager
from server_patch.stats import STATS_NAME, Stats

logger = logging.getLogger(__name__)

_STATS_INTERVAL_S: Final = 1.0
_MAX_REASON_CHARS: Final = 500


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One dump to be written: rows of a slot, and what to say of them."""

    header: DumpHeader
    slot: Slot
    slot_rows: int  # rows the slot was filled with: they place its sections
    begin: int  # first row of the piece within the slot


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One error record to be written."""

    record: ErrorRecord
    counter: int


class WriterPool:
    """`num_writers` daemon threads over one queue. Nothing a thread meets ends it."""

    def __init__(
        self,
        *,
        directory: Path,
        file_mode: int,
        num_writers: int,
        layout: Layout,
        ring: Ring,
        stager: Stager,
        stats: Stats,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._file_mode = file_mode
        self._layout = layout
        self._ring = ring
        self._stager = stager
        self._stats = stats
        self._clock = clock
        self._queue: queue.SimpleQueue[Piece | Failure] = queue.SimpleQueue()
        self._stats_lock = threading.Lock()
        self._stats_written = (0, -_STATS_INTERVAL_S)  # version, clock
        self._threads = [
            threading.Thread(target=self._run, name=f"hidden-states-writer-{i}", daemon=True)
            for i in range(num_writers)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def submit(self, item: Piece | Failure) -> None:
        """Queue one file. Never blocks: the ring bounds the pieces."""
        self._queue.put(item)

    def _run(self) -> None:
        try:
            self._stager.enter_thread()
        except Exception:
            logger.exception("hidden states: a writer thread could not enter the device")
        while True:
            try:
                item = self._queue.get(timeout=_STATS_INTERVAL_S)
            except queue.Empty:
                self._show_stats()
                continue
            try:
                if isinstance(item, Piece):
                    self._write_piece(item)
                else:
                    self._write_failure(item)
            except Exception:
                logger.exception("hidden states: a writer thread met an unexpected error")
            self._show_stats()

    def _write_piece(self, piece: Piece) -> None:
        header = piece.header
        try:
            try:
                self._stager.wait(piece.slot)
                begun = time.perf_counter()
                size_bytes = write_whole(
                    self._directory,
                    dump_name(header.counter),
                    self._parts(piece),
                    mode=self._file_mode,
                )
                seconds = time.perf_counter() - begun
            finally:
                self._ring.release(piece.slot)
        except Exception as error:
            record = ErrorRecord(
                rid=header.rid, start=header.start, reason=describe(error, doing="writing")
            )
            self._stats.add(errors=1)
            self._write_failure(Failure(record=record, counter=header.counter))
        else:
            self._stats.add(
                pieces=1, rows=header.rows, dump_bytes=size_bytes, write_seconds=seconds
            )

    def _parts(self, piece: Piece) -> list[Buffer]:
        """The file's bytes: header, then one run of the slot per tensor."""
        parts: list[Buffer] = [encode_header(piece.header)]
        for section in self._layout.sections(piece.slot_rows):
            begin = section.offset + piece.begin * section.row_bytes
            parts.append(piece.slot.memory[begin : begin + piece.header.rows * section.row_bytes])
        return parts

    def _write_failure(self, failure: Failure) -> None:
        try:
            write_whole(
                self._directory,
                error_name(failure.counter),
                [encode_error(failure.record)],
                mode=self._file_mode,
            )
        except Exception as error:
            # Nothing else can be told to the client, which will miss the piece by itself.
            self._stats.add(errors_lost=1)
            logger.error(
                "hidden states: no error record for rid %s (%s): %r",
                failure.record.rid,
                failure.record.reason,
                error,
            )

    def _show_stats(self) -> None:
        """Rewrite STATS.json if something changed, at most once a second."""
        if not self._stats_lock.acquire(blocking=False):
            return
        try:
            version, shown_at = self._stats_written
            now = self._clock()
            if self._stats.version == version or now - shown_at < _STATS_INTERVAL_S:
                return
            self._stats_written = (self._stats.version, now)
            replace(self._directory, STATS_NAME, self._stats.encode(), mode=self._file_mode)
        except OSError:
            pass  # a view for humans; the dumps' own failures are recorded
        finally:
            self._stats_lock.release()


def describe(error: Exception, *, doing: str) -> str:
    """The reason in an error record: what was done, what came of it, never the payload."""
    text = f"{doing} failed: {type(error).__name__}: {error}"
    return text[:_MAX_REASON_CHARS]

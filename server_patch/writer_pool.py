"""The scheduler's side of the writer processes: hands them jobs and takes their reports.

One thread, which does little and waits much: for each slot's copy, and then to send its jobs. The
reports are taken when somebody needs what they say. A writer process that dies is replaced, and
what it had been given becomes error records.
"""

from __future__ import annotations

import logging
import queue
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from server_patch.dump_format import dump_name, error_name
from server_patch.durable_files import remove_unfinished, replace
from server_patch.ring import Ring, Slot
from server_patch.staging import Stager
from server_patch.stats import STATS_NAME, Stats
from server_patch.writer_process import describe, write_failures
from server_patch.writer_protocol import (
    MAX_MESSAGE_BYTES,
    MAX_PIECES,
    Assignment,
    Failure,
    Job,
    Piece,
    Report,
)

logger = logging.getLogger(__name__)

_STATS_INTERVAL_S: Final = 1.0
_START_TIMEOUT_S: Final = 60.0
#: A writer needs a fraction of a second for a job. While the ring is full the forward stands still,
#: and the engine's watchdog ends a server whose forward does so for minutes (300 s by default).
_PATIENCE_S: Final = 60.0
#: What one writer writes in a few milliseconds.
_PART_BYTES: Final = 8 << 20
#: Isolated and without site: a writer needs the standard library and this package, nothing else.
_SCRIBE: Final = "import sys; sys.path.insert(0, sys.argv.pop(1)); " + (
    "from server_patch.writer_process import main; main()"
)


class WriterError(RuntimeError):
    """A writer process does not start."""


@dataclass(kw_only=True)
class _Writer:
    """One writer process and the jobs it was given, oldest first."""

    process: subprocess.Popen[bytes]
    socket: socket.socket
    given: deque[tuple[Slot | None, Job]] = field(default_factory=deque)
    num_reports: int = 0
    waited_for_since: float = 0.0  # clock; its last report, or its first job after none was left
    was_stuck: bool = False  # and therefore killed


class WriterPool:
    """`num_writers` processes. Nothing that goes wrong in one of them ends the serving."""

    def __init__(
        self,
        *,
        assignment: Callable[[int], Assignment],
        directory: Path,
        file_mode: int,
        num_writers: int,
        ring: Ring,
        stager: Stager,
        stats: Stats,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """assignment: descriptor of a writer's socket -> what that writer is told."""
        self._assignment = assignment
        self._directory = directory
        self._file_mode = file_mode
        self._num_writers = num_writers
        self._ring = ring
        self._stager = stager
        self._stats = stats
        self._clock = clock
        self._queue: queue.SimpleQueue[tuple[Slot | None, Job]] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()  # guards the list of writers and what each was given
        self._taking = threading.Lock()  # held by the thread that takes reports
        self._writers: list[_Writer] = []
        self._num_to_start = 0
        self._shown = (0, -_STATS_INTERVAL_S)  # version of the counters, clock

    def start(self) -> None:
        """Start processes and thread. Raises WriterError when one does not come up."""
        self._writers = [self._spawn() for _ in range(self._num_writers)]
        threading.Thread(target=self._run, name="hidden-states", daemon=True).start()

    def submit(
        self, slot: Slot, *, slot_rows: int, pieces: Sequence[Piece], weights: str | None = None
    ) -> None:
        """Queue the dumps of one filled slot. Never blocks: the ring bounds them."""
        job = Job(slot=slot.index, slot_rows=slot_rows, pieces=pieces, weights=weights)
        self._queue.put((slot, job))

    def submit_failures(self, failures: Sequence[Failure]) -> None:
        """Queue error records. Never blocks."""
        self._queue.put((None, Job(slot=None, failures=failures)))

    def stop(self) -> None:
        """End the processes; for tests. A server ends them with itself."""
        with self._lock:
            writers, self._writers = self._writers, []
        for writer in writers:
            writer.process.kill()
            writer.process.wait()

    # --- sending -----------------------------------------------------------------------------

    def _run(self) -> None:
        """The thread: one wake-up a forward, for each takes the interpreter from the scheduler."""
        with suppress(Exception):
            self._stager.enter_thread()
        while True:
            try:
                slot, job = self._queue.get(timeout=_STATS_INTERVAL_S)
            except queue.Empty:
                self._keep_house()
                continue
            parts = self._parts(slot, job)
            self._keep_house()  # before sending, to know who has least to do
            for part in parts:
                try:
                    self._send(slot, part)
                except Exception as error:
                    self._give_up(slot, part, describe(error, doing="handing over"))

    def _keep_house(self) -> None:
        try:
            self.take_reports(timeout_s=0)
            self._replace_dead()
            self._show_stats()
        except Exception:
            logger.exception("hidden states: the writers' keeper met an unexpected error")

    def _parts(self, slot: Slot | None, job: Job) -> list[Job]:
        """`job`, once its slot is filled, in parts that fit a message and can be written side by
        side. Each part is one use of the slot."""
        doing = "copying to the host"
        try:
            if slot is not None:
                self._stager.wait(slot)
            doing = "handing over"
            parts = _split(job, num_parts=self._num_parts(job))
        except Exception as error:
            failures = _as_failures(job, describe(error, doing=doing))
            self._stats.add(errors=len(failures))
            parts = [Job(slot=None, failures=[*failures, *job.failures])]
        if slot is not None:
            self._ring.hold(slot, len(parts))
        return parts

    def _num_parts(self, job: Job) -> int:
        """As many as there are writers, unless that makes them small: a message costs too."""
        plan = self._ring.plan
        wanted = job.slot_rows * plan.slot_bytes // plan.slot_rows // _PART_BYTES
        return max(1, min(self._num_writers, wanted))

    def _send(self, slot: Slot | None, job: Job) -> None:
        """Give `job` to a writer, or raise and leave it to the caller."""
        data = job.encode()
        with self._lock:
            writer = min(self._writers, key=lambda writer: len(writer.given), default=None)
            if writer is None:
                raise WriterError("no writer process is left")
            if not writer.given:
                writer.waited_for_since = self._clock()
            # Before it is sent: the report may come at once.
            writer.given.append((slot, job))
        try:
            writer.socket.send(data)
        except ConnectionError:
            return  # it has died and taken the job with it: its end will be read
        except OSError:  # it lives and never got the job: a message can be too long for a socket
            with self._lock:
                if writer not in self._writers:
                    return
                writer.given.pop()
            raise

    # --- receiving ---------------------------------------------------------------------------

    def take_reports(self, *, timeout_s: float) -> None:
        """Take in what the writers have reported, and give their slots back.

        Waits up to `timeout_s` for a first report. Any thread may call: the one that needs a slot
        need not wait for another to run. Returns at once when another thread is at it.
        """
        if not self._taking.acquire(timeout=timeout_s):
            return
        try:
            for key, _ in self._selector.select(timeout=timeout_s):
                self._take_report(key.data)
            self._end_stuck()
        finally:
            self._taking.release()

    def _end_stuck(self) -> None:
        """Kill writers that have jobs and say nothing: stopped by a signal, for one. What they were
        given is then recorded as of any dead one, and the forward gets its slots back."""
        now = self._clock()
        with self._lock:
            waited_for = [w for w in self._writers if w.given and not w.was_stuck]
        for writer in waited_for:
            if now - writer.waited_for_since > _PATIENCE_S:
                logger.error("hidden states: a writer process says nothing for %s s", _PATIENCE_S)
                writer.was_stuck = True
                writer.process.kill()

    def _take_report(self, writer: _Writer) -> None:
        try:
            data = writer.socket.recv(MAX_MESSAGE_BYTES)
        except OSError:
            data = b""
        if not data:
            self._bury(writer)
            return
        report = Report.decode(data)
        writer.num_reports += 1
        with self._lock:
            slot, _ = writer.given.popleft()
            writer.waited_for_since = self._clock()
        if slot is not None:
            self._ring.release(slot)
        self._stats.add(**report._asdict())
        self._tell_lost(report.errors_lost)

    def _bury(self, writer: _Writer) -> None:
        """A writer process is gone: record its jobs as failed; another will take its place."""
        self._selector.unregister(writer.socket)
        writer.socket.close()
        status = writer.process.wait()
        with self._lock:
            was_ours = writer in self._writers
            if was_ours:
                self._writers.remove(writer)
                # One that never did any work would only die again.
                self._num_to_start += writer.was_stuck or writer.num_reports > 0
        if was_ours:
            logger.error("hidden states: a writer process ended with status %s", status)
        for slot, job in writer.given:
            self._remove_unfinished(job)
            self._give_up(slot, job, f"the writer process ended with status {status}")

    def _remove_unfinished(self, job: Job) -> None:
        """Remove what a dead writer had begun of `job`: it takes memory, and no other write of it
        would come to take its place."""
        dumps = [piece.counter for piece in job.pieces]
        records = [*dumps, *(failure.counter for failure in job.failures)]
        names = [*map(dump_name, dumps), *map(error_name, records)]
        for name in names:
            with suppress(OSError):
                remove_unfinished(self._directory, name)

    def _replace_dead(self) -> None:
        with self._lock:
            count, self._num_to_start = self._num_to_start, 0
        for _ in range(count):
            with suppress(WriterError):
                successor = self._spawn()
                with self._lock:
                    self._writers.append(successor)

    def _give_up(self, slot: Slot | None, job: Job, reason: str) -> None:
        failures = [*_as_failures(job, reason), *job.failures]
        lost = write_failures(failures, self._directory, mode=self._file_mode)
        self._stats.add(errors=len(job.pieces), errors_lost=lost)
        self._tell_lost(lost)
        if slot is not None:
            self._ring.release(slot)

    def _tell_lost(self, count: int) -> None:
        if count:
            logger.error(
                "hidden states: %s error records could not be written to %s",
                count,
                self._directory,
            )

    def _show_stats(self) -> None:
        """Rewrite STATS.json if something changed, at most once a second."""
        version, shown_at = self._shown
        now = self._clock()
        if self._stats.version == version or now - shown_at < _STATS_INTERVAL_S:
            return
        self._shown = (self._stats.version, now)
        with suppress(OSError):  # a view for people; the dumps' own failures are recorded
            replace(self._directory, STATS_NAME, self._stats.encode(), mode=self._file_mode)

    # --- processes ---------------------------------------------------------------------------

    def _spawn(self) -> _Writer:
        """Start a writer and hear from it. Raises WriterError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        assignment = self._assignment(theirs.fileno())
        package_directory = str(Path(__file__).resolve().parent.parent)
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _SCRIBE, package_directory, assignment.encode()],
                pass_fds=(theirs.fileno(), assignment.ring_descriptor),
                stdin=subprocess.DEVNULL,
            )
        except OSError as error:
            raise WriterError(f"a writer process cannot be started: {error}") from error
        finally:
            theirs.close()
        ours.settimeout(_START_TIMEOUT_S)
        try:
            greeting = ours.recv(MAX_MESSAGE_BYTES)
        except OSError as error:
            greeting = b""
            logger.error("hidden states: a writer process says nothing: %s", error)
        if not greeting:
            process.kill()
            raise WriterError(f"a writer process ended with status {process.wait()}")
        ours.settimeout(None)
        writer = _Writer(process=process, socket=ours)
        self._selector.register(ours, selectors.EVENT_READ, writer)
        return writer


def _split(job: Job, *, num_parts: int) -> list[Job]:
    """Parts of about equal rows, none with more than MAX_PIECES files; at least one."""
    if not job.pieces:
        step = MAX_PIECES
        return [
            Job(slot=None, failures=job.failures[i : i + step])
            for i in range(0, len(job.failures), step)
        ] or [job]
    fair_rows = -(-sum(piece.rows for piece in job.pieces) // num_parts)
    parts: list[list[Piece]] = [[]]
    rows = 0
    for piece in job.pieces:
        if parts[-1] and (rows >= fair_rows or len(parts[-1]) == MAX_PIECES):
            parts.append([])
            rows = 0
        parts[-1].append(piece)
        rows += piece.rows
    return [job._replace(pieces=part) for part in parts]


def _as_failures(job: Job, reason: str) -> list[Failure]:
    return [
        Failure(rid=piece.rid, start=piece.start, reason=reason, counter=piece.counter)
        for piece in job.pieces
    ]

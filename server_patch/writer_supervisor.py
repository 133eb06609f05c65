"""Starts the writer processes, hands them jobs, and replaces those that die."""

from __future__ import annotations

import logging
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from server_patch.dump_dir import make_writer_token
from server_patch.ring import RingSlot
from server_patch.writer_protocol import MAX_MESSAGE_BYTES, Assignment, Job, Report

logger = logging.getLogger(__name__)

_START_TIMEOUT_S: Final = 60.0
#: A writer needs a fraction of a second for a job. While the ring is full the forward stands still,
#: and the engine's watchdog ends a server whose forward does so for minutes (300 s by default).
_PATIENCE_S: Final = 60.0
#: Isolated and without site: a writer needs the standard library and this package, nothing else.
_MAIN: Final = "import sys; sys.path.insert(0, sys.argv.pop(1)); " + (
    "from server_patch.writer_process import main; main()"
)


class WriterError(RuntimeError):
    """A writer process does not start, or none is left."""


class Settled(NamedTuple):
    """A job that a writer has finished or failed."""

    slot: RingSlot | None
    job: Job
    report: Report | None = None  # None if the writer died first
    reason: str = ""  # how it died


@dataclass(kw_only=True)
class _Writer:
    """One writer process and the jobs it was given, oldest first."""

    process: subprocess.Popen[bytes]
    socket: socket.socket
    token: str  # begins the names of its unfinished files
    given: deque[tuple[RingSlot | None, Job]] = field(default_factory=deque)
    num_reports: int = 0
    waited_for_since: float = 0.0  # clock; its last report, or its first job after none was left
    was_stuck: bool = False  # and therefore killed


class WriterSupervisor:
    """The running writer processes. An error in one of them never ends the server."""

    def __init__(
        self, assignment: Assignment, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._assignment = assignment
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()  # guards the list of writers and the jobs of each
        self._taking = threading.Lock()  # held by the thread that takes reports
        self._writers: list[_Writer] = []
        self._num_to_start = 0

    def start(self, num_writers: int) -> None:
        """Start the processes. Raises WriterError if one does not start."""
        self._writers = [self._spawn() for _ in range(num_writers)]

    def stop(self) -> None:
        """End the processes; for tests. A server ends them with itself."""
        with self._lock:
            writers, self._writers = self._writers, []
        for writer in writers:
            writer.process.kill()
            writer.process.wait()

    def send(self, slot: RingSlot | None, job: Job) -> None:
        """Give `job` to the writer with the fewest jobs, or raise and leave it to the caller.

        Raises WriterError, OSError, or the error of encoding the job.
        """
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

    def take_reports(self, settle: Callable[[Settled], None], *, timeout_s: float) -> None:
        """Call `settle` for each job that was reported since, and for each job of a dead writer.

        Waits up to `timeout_s` seconds for a first report. Any thread may call. Returns at once
        when another thread is at it.
        """
        if not self._taking.acquire(timeout=timeout_s):
            return
        try:
            for key, _ in self._selector.select(timeout=timeout_s):
                self._take_report(key.data, settle)
            self._kill_stuck()
        finally:
            self._taking.release()

    def replace_dead(self) -> None:
        """Start a successor for each writer that died after it had done work."""
        with self._lock:
            count, self._num_to_start = self._num_to_start, 0
        for _ in range(count):
            with suppress(WriterError):
                successor = self._spawn()
                with self._lock:
                    self._writers.append(successor)

    def _take_report(self, writer: _Writer, settle: Callable[[Settled], None]) -> None:
        try:
            data = writer.socket.recv(MAX_MESSAGE_BYTES)
        except OSError:
            data = b""
        if not data:
            self._bury(writer, settle)
            return
        report = Report.decode(data)
        writer.num_reports += 1
        with self._lock:
            slot, job = writer.given.popleft()
            writer.waited_for_since = self._clock()
        settle(Settled(slot=slot, job=job, report=report))

    def _bury(self, writer: _Writer, settle: Callable[[Settled], None]) -> None:
        """Take a dead writer off the list; its jobs have failed."""
        self._selector.unregister(writer.socket)
        writer.socket.close()
        status = writer.process.wait()
        # They take memory, and nobody else writes to these names.
        with suppress(OSError):
            self._assignment.rank_dir.directory.remove_unfinished(writer.token)
        with self._lock:
            was_ours = writer in self._writers
            if was_ours:
                self._writers.remove(writer)
                # One that never did any work would only die again.
                self._num_to_start += writer.was_stuck or writer.num_reports > 0
        if was_ours:
            logger.error("hidden states: a writer process ended with status %s", status)
        for slot, job in writer.given:
            settle(Settled(slot, job, reason=f"the writer process ended with status {status}"))

    def _kill_stuck(self) -> None:
        """Kill writers that have jobs and report nothing: stopped by a signal, for one. Their jobs
        then fail like those of any dead writer, and the forward gets its slots back."""
        now = self._clock()
        with self._lock:
            waited_for = [w for w in self._writers if w.given and not w.was_stuck]
        for writer in waited_for:
            if now - writer.waited_for_since > _PATIENCE_S:
                logger.error(
                    "hidden states: killing a writer process after %s s without a report",
                    _PATIENCE_S,
                )
                writer.was_stuck = True
                writer.process.kill()

    def _spawn(self) -> _Writer:
        """Start a writer and wait until it is ready. Raises WriterError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        package_directory = str(Path(__file__).resolve().parent.parent)
        token = make_writer_token()
        assignment = self._assignment.encode(writer=token)
        arguments = [package_directory, assignment, str(theirs.fileno())]
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _MAIN, *arguments],
                pass_fds=(theirs.fileno(), *self._assignment.descriptors),
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
            logger.error("hidden states: a writer process does not start: %s", error)
        if not greeting:
            process.kill()
            raise WriterError(f"a writer process ended with status {process.wait()}")
        ours.settimeout(None)
        writer = _Writer(process=process, socket=ours, token=token)
        self._selector.register(ours, selectors.EVENT_READ, writer)
        return writer

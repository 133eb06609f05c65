"""The queue between the forward thread and the writer processes.

One thread waits for each slot's copy and then sends its jobs. The reports are taken when a slot is
needed, and whenever the thread wakes up. The jobs of a writer process that dies become error
records.
"""

from __future__ import annotations

import logging
import queue
import threading
from contextlib import suppress
from typing import Final

from server_patch.dump_dir import RankDir
from server_patch.ring import Ring, RingSlot
from server_patch.staging import Stager
from server_patch.stats import Stats
from server_patch.writer_process import describe, write_failures
from server_patch.writer_protocol import MAX_PIECES, FailedPiece, Job, Report, SlotPiece
from server_patch.writer_supervisor import Settled, WriterSupervisor

logger = logging.getLogger(__name__)

#: Longest time between two turns of the thread.
_TURN_S: Final = 1.0
#: Bytes that one writer writes in a few milliseconds.
_PART_BYTES: Final = 8 << 20


class WriterPool:
    """Takes filled slots and has their dumps written. No error in it ends the server."""

    def __init__(
        self,
        supervisor: WriterSupervisor,
        *,
        num_writers: int,
        rank_dir: RankDir,
        ring: Ring,
        stager: Stager,
        stats: Stats,
    ) -> None:
        self._supervisor = supervisor
        self._num_writers = num_writers
        self._rank_dir = rank_dir
        self._ring = ring
        self._stager = stager
        self._stats = stats
        self._queue: queue.SimpleQueue[tuple[RingSlot | None, Job]] = queue.SimpleQueue()

    def start(self) -> None:
        """Start processes and thread. Raises WriterError if a process does not start."""
        self._supervisor.start(self._num_writers)
        threading.Thread(target=self._run, name="hidden-states", daemon=True).start()

    def submit(self, slot: RingSlot | None, job: Job) -> None:
        """Queue the dumps of a filled slot, or error records. Never blocks."""
        self._queue.put((slot, job))

    def take_reports(self, *, timeout_s: float) -> None:
        """Release the slots of reported jobs; wait up to `timeout_s` seconds for a first report.

        Any thread may call: the one that needs a slot need not wait for another to run.
        """
        self._supervisor.take_reports(self._settle, timeout_s=timeout_s)

    def _run(self) -> None:
        """Body of the thread.

        It wakes up once per forward, since each wake-up takes the interpreter from the scheduler.
        """
        with suppress(Exception):
            self._stager.enter_thread()
        while True:
            try:
                slot, job = self._queue.get(timeout=_TURN_S)
            except queue.Empty:
                self._maintain()
                continue
            parts = self._parts(slot, job)
            self._maintain()  # before sending, to know which writer has the fewest jobs
            for part in parts:
                try:
                    self._supervisor.send(slot, part)
                except Exception as error:
                    self._give_up(slot, part, describe(error, doing="handing over"))

    def _maintain(self) -> None:
        try:
            self.take_reports(timeout_s=0)
            self._supervisor.replace_dead()
            self._stats.refresh_file()
        except Exception:
            logger.exception("hidden states: unexpected error in the writer pool")

    def _parts(self, slot: RingSlot | None, job: Job) -> list[Job]:
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
            self._stats.add_report(Report(errors=len(failures)))
            parts = [Job(slot=None, failures=[*failures, *job.failures])]
        if slot is not None:
            slot.uses = len(parts)
        return parts

    def _num_parts(self, job: Job) -> int:
        """One part per writer, but fewer if the parts were small: a message has a cost too."""
        plan = self._ring.plan
        wanted = job.slot_rows * plan.slot_bytes // plan.slot_rows // _PART_BYTES
        return max(1, min(self._num_writers, wanted))

    def _settle(self, settled: Settled) -> None:
        if settled.report is None:
            self._give_up(settled.slot, settled.job, settled.reason)
            return
        if settled.slot is not None:
            self._ring.release(settled.slot)
        self._count(settled.report)

    def _give_up(self, slot: RingSlot | None, job: Job, reason: str) -> None:
        """Write error records for the whole job."""
        failures = [*_as_failures(job, reason), *job.failures]
        lost = write_failures(failures, self._rank_dir)
        self._count(Report(errors=len(job.pieces), errors_lost=lost))
        if slot is not None:
            self._ring.release(slot)

    def _count(self, report: Report) -> None:
        self._stats.add_report(report)
        if report.errors_lost:
            logger.error(
                "hidden states: %s error records could not be written to %s",
                report.errors_lost,
                self._rank_dir.directory.path,
            )


def _split(job: Job, *, num_parts: int) -> list[Job]:
    """Parts of about equal rows, none with more than MAX_PIECES files; at least one."""
    if not job.pieces:
        step = MAX_PIECES
        return [
            Job(slot=None, failures=job.failures[i : i + step])
            for i in range(0, len(job.failures), step)
        ] or [job]
    fair_rows = -(-sum(piece.rows for piece in job.pieces) // num_parts)
    parts: list[list[SlotPiece]] = [[]]
    rows = 0
    for piece in job.pieces:
        if parts[-1] and (rows >= fair_rows or len(parts[-1]) == MAX_PIECES):
            parts.append([])
            rows = 0
        parts[-1].append(piece)
        rows += piece.rows
    return [job._replace(pieces=part) for part in parts]


def _as_failures(job: Job, reason: str) -> list[FailedPiece]:
    return [piece.failed(reason) for piece in job.pieces]

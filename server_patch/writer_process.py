"""The writer process: writes filled slots to dump files. Standard library only.

The files are written by processes, not by threads of the scheduler: each system call of a thread
gives up the interpreter lock and takes it back, and at hundreds of files a forward the scheduler's
own thread, which launches the kernels, would spend its time handing that lock around.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Final

from server_patch import request_log
from server_patch.directory import Buffer
from server_patch.dump_dir import RankDir
from server_patch.dump_format import (
    DumpHeader,
    ErrorRecord,
    dump_name,
    encode_error,
    encode_header,
    error_name,
)
from server_patch.slot_layout import SlotLayout
from server_patch.writer_protocol import (
    MAX_MESSAGE_BYTES,
    Assignment,
    FailedPiece,
    Job,
    Report,
    SlotPiece,
)

_MAX_REASON_CHARS: Final = 500
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


class DumpWriter:
    """Writes the files of one rank. An error in one file does not stop the next."""

    def __init__(self, assignment: Assignment, ring: memoryview) -> None:
        """ring: the slots' memory, slot after slot."""
        self._rank_dir = assignment.rank_dir
        self._layout = SlotLayout(assignment.states)
        self._slot_bytes = assignment.ring.slot_bytes
        self._ring = ring

    def write(self, job: Job) -> Report:
        """Write every file of `job`."""
        failures = list(job.failures)
        is_logged = request_log.debug_enabled()
        pieces = rows = dump_bytes = 0
        begun = time.perf_counter()
        for piece in job.pieces:
            try:
                dump_bytes += self._rank_dir.write(
                    dump_name(piece.counter), self._parts(job, piece)
                )
            except Exception as error:
                failures.append(piece.failed(describe(error, doing="writing")))
            else:
                pieces += 1
                rows += piece.rows
                if is_logged:
                    request_log.written(
                        piece.rid, counter=piece.counter, start=piece.start, rows=piece.rows
                    )
        seconds = time.perf_counter() - begun
        return Report(
            pieces=pieces,
            rows=rows,
            dump_bytes=dump_bytes,
            errors=len(failures) - len(job.failures),
            errors_lost=write_failures(failures, self._rank_dir),
            write_seconds=seconds,
        )

    def _parts(self, job: Job, piece: SlotPiece) -> list[Buffer]:
        """The file's bytes: header, then one run of the slot per tensor."""
        assert job.slot is not None
        header = DumpHeader(
            rid=piece.rid,
            start=piece.start,
            rows=piece.rows,
            layout=self._layout.states,
            boot_id=self._rank_dir.boot_id,
            rank=self._rank_dir.rank,
            counter=piece.counter,
            weights=job.weights,
        )
        parts: list[Buffer] = [encode_header(header)]
        base = job.slot * self._slot_bytes
        for section in self._layout.sections(job.slot_rows):
            begin = base + section.offset + piece.begin * section.row_bytes
            parts.append(self._ring[begin : begin + piece.rows * section.row_bytes])
        return parts


def write_failures(failures: Sequence[FailedPiece], rank_dir: RankDir) -> int:
    """Write an error record for each failure; return how many could not be written.

    The client learns nothing of those; it misses their rows when its dump timeout ends.
    """
    lost = 0
    for failure in failures:
        reason = failure.reason
        record = ErrorRecord(rid=failure.rid, start=failure.start, reason=failure.reason)
        try:
            rank_dir.write(error_name(failure.counter), [encode_error(record)])
        except Exception as error:
            lost += 1
            reason = f"{reason} ({describe(error, doing='writing the error record')})"
        request_log.failed(failure.rid, counter=failure.counter, start=failure.start, reason=reason)
    return lost


def describe(error: Exception, *, doing: str) -> str:
    """The reason in an error record: the failed step and its error, never the payload."""
    return f"{doing} failed: {type(error).__name__}: {error}"[:_MAX_REASON_CHARS]


def main() -> None:
    """Write jobs until the scheduler ends.

    Arguments: the `Assignment`, and the descriptor of the socket to the scheduler.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the scheduler's to handle
    # The socket shows the scheduler's end too, unless a child of it inherited its end.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    assignment = Assignment.decode(sys.argv[1])
    request_log.set_level(assignment.log_level)
    request_log.write_to_stderr()
    with socket.socket(fileno=int(sys.argv[2])) as scheduler:
        descriptor = assignment.ring_descriptor
        ring = mmap.mmap(descriptor, assignment.ring.total_bytes, prot=mmap.PROT_READ)
        os.close(descriptor)
        writer = DumpWriter(assignment, memoryview(ring))
        scheduler.send(Report().encode())  # ready
        while data := scheduler.recv(MAX_MESSAGE_BYTES):
            scheduler.send(writer.write(Job.decode(data)).encode())

"""A writer process: turns filled slots into dump files. Standard library only.

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
from pathlib import Path
from typing import Final

from server_patch.dump_format import (
    DumpHeader,
    ErrorRecord,
    StateLayout,
    dump_name,
    encode_error,
    encode_header,
    error_name,
)
from server_patch.durable_files import Buffer, write_whole
from server_patch.writer_protocol import MAX_MESSAGE_BYTES, Assignment, Failure, Job, Piece, Report

_MAX_REASON_CHARS: Final = 500
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


class Scribe:
    """Writes files for one rank. Nothing that goes wrong with one file stops the next."""

    def __init__(self, assignment: Assignment, ring: memoryview) -> None:
        """ring: the slots' memory, slot after slot."""
        self._assignment = assignment
        self._directory = Path(assignment.directory)
        self._ring = ring
        self._states = StateLayout(
            boundaries=assignment.boundaries,
            hidden_size=assignment.layout.hidden_size,
            dtype=assignment.layout.dtype,
            last_kind=assignment.layout.last_kind,
        )

    def write(self, job: Job) -> Report:
        """Write every file of `job`."""
        failures = list(job.failures)
        pieces = rows = dump_bytes = 0
        begun = time.perf_counter()
        for piece in job.pieces:
            try:
                dump_bytes += write_whole(
                    self._directory,
                    dump_name(piece.counter),
                    self._parts(job, piece),
                    mode=self._assignment.file_mode,
                )
            except Exception as error:
                failures.append(
                    Failure(
                        rid=piece.rid,
                        start=piece.start,
                        reason=describe(error, doing="writing"),
                        counter=piece.counter,
                    )
                )
            else:
                pieces += 1
                rows += piece.rows
        seconds = time.perf_counter() - begun
        return Report(
            pieces=pieces,
            rows=rows,
            dump_bytes=dump_bytes,
            errors=len(failures) - len(job.failures),
            errors_lost=write_failures(failures, self._directory, mode=self._assignment.file_mode),
            write_seconds=seconds,
        )

    def _parts(self, job: Job, piece: Piece) -> list[Buffer]:
        """The file's bytes: header, then one run of the slot per tensor."""
        assert job.slot is not None
        assignment = self._assignment
        header = DumpHeader(
            rid=piece.rid,
            start=piece.start,
            rows=piece.rows,
            layout=self._states,
            boot_id=assignment.boot_id,
            rank=assignment.rank,
            counter=piece.counter,
            weights=job.weights,
        )
        parts: list[Buffer] = [encode_header(header)]
        base = job.slot * assignment.slot_bytes
        for section in assignment.layout.sections(job.slot_rows):
            begin = base + section.offset + piece.begin * section.row_bytes
            parts.append(self._ring[begin : begin + piece.rows * section.row_bytes])
        return parts


def write_failures(failures: Sequence[Failure], directory: Path, *, mode: int) -> int:
    """Write an error record for each; how many could not be written.

    Nothing more can be told to the client then, which will miss the piece by itself.
    """
    lost = 0
    for failure in failures:
        record = ErrorRecord(rid=failure.rid, start=failure.start, reason=failure.reason)
        try:
            write_whole(directory, error_name(failure.counter), [encode_error(record)], mode=mode)
        except Exception:
            lost += 1
    return lost


def describe(error: Exception, *, doing: str) -> str:
    """The reason in an error record: what was done, what came of it, never the payload."""
    return f"{doing} failed: {type(error).__name__}: {error}"[:_MAX_REASON_CHARS]


def main() -> None:
    """The process: jobs until the scheduler is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the scheduler's to handle
    # The socket tells of the scheduler's end too, unless a child of it inherited its end.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    assignment = Assignment.decode(sys.argv[1])
    with socket.socket(fileno=assignment.socket_descriptor) as scheduler:
        ring = mmap.mmap(assignment.ring_descriptor, assignment.ring_bytes, prot=mmap.PROT_READ)
        os.close(assignment.ring_descriptor)
        scribe = Scribe(assignment, memoryview(ring))
        scheduler.send(Report().encode())  # ready
        while data := scheduler.recv(MAX_MESSAGE_BYTES):
            scheduler.send(scribe.write(Job.decode(data)).encode())

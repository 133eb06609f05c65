"""What the scheduler process and its writer processes say to each other. Standard library only.

One datagram is one message, as JSON. To a writer: a `Job`. Back, once for each job: a `Report`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from server_patch.layout import Layout

#: Most pieces in one job: a job of such pieces is far smaller than a socket's buffer.
MAX_PIECES: Final = 64
#: Bytes that hold any message.
MAX_MESSAGE_BYTES: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One dump to be written: rows of a slot."""

    rid: str
    start: int  # position in the prompt of the first row
    begin: int  # first row within the slot
    rows: int
    counter: int


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One error record to be written."""

    rid: str
    start: int
    reason: str
    counter: int


@dataclass(frozen=True, kw_only=True)
class Job:
    """Files to be written from one slot; `slot` is None when there are only failures."""

    slot: int | None
    slot_rows: int = 0  # rows the slot was filled with: they place its sections
    pieces: Sequence[Piece] = ()
    failures: Sequence[Failure] = ()

    def encode(self) -> bytes:
        return json.dumps(
            [
                self.slot,
                self.slot_rows,
                [[p.rid, p.start, p.begin, p.rows, p.counter] for p in self.pieces],
                [[f.rid, f.start, f.reason, f.counter] for f in self.failures],
            ]
        ).encode()

    @classmethod
    def decode(cls, data: bytes) -> Job:
        slot, slot_rows, pieces, failures = json.loads(data)
        return cls(
            slot=slot,
            slot_rows=slot_rows,
            pieces=[
                Piece(rid=rid, start=start, begin=begin, rows=rows, counter=counter)
                for rid, start, begin, rows, counter in pieces
            ],
            failures=[
                Failure(rid=rid, start=start, reason=reason, counter=counter)
                for rid, start, reason, counter in failures
            ],
        )


@dataclass(frozen=True, kw_only=True)
class Report:
    """What became of one job. Added up in the scheduler's counters."""

    pieces: int = 0  # dumps written whole
    rows: int = 0
    dump_bytes: int = 0
    errors: int = 0  # pieces that became error records
    errors_lost: int = 0  # error records that could not be written
    write_seconds: float = 0.0

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Report:
        return cls(**json.loads(data))


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What a writer process is told once, when it starts."""

    directory: str
    file_mode: int
    layout: Layout
    boundaries: tuple[int, ...]
    boot_id: str
    rank: int
    slot_bytes: int
    ring_bytes: int
    ring_descriptor: int
    socket_descriptor: int

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Assignment:
        document = json.loads(text)
        document["layout"] = Layout(**document["layout"])
        document["boundaries"] = tuple(document["boundaries"])
        return cls(**document)

"""What the scheduler process and its writer processes say to each other. Standard library only.

One datagram is one message, as JSON. To a writer: a `Job`. Back, once for each job: a `Report`.
What is made for every request of every forward is a tuple, which JSON takes as it is: the time it
takes is the scheduler's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final, NamedTuple

from server_patch.slot_layout import Layout

#: Most pieces in one job: a job of such pieces is far smaller than a socket's buffer.
MAX_PIECES: Final = 64
#: Bytes that hold any message.
MAX_MESSAGE_BYTES: Final = 1 << 20


class Piece(NamedTuple):
    """One dump to be written: rows of a slot."""

    rid: str
    start: int  # position in the prompt of the first row
    begin: int  # first row within the slot
    rows: int
    counter: int


class Failure(NamedTuple):
    """One error record to be written."""

    rid: str
    start: int
    reason: str
    counter: int


class Job(NamedTuple):
    """Files to be written from one slot; `slot` is None when there are only failures."""

    slot: int | None
    slot_rows: int = 0  # rows the slot was filled with: they place its sections
    pieces: Sequence[Piece] = ()
    failures: Sequence[Failure] = ()
    weights: str | None = None  # id of the weights that computed the rows

    def encode(self) -> bytes:
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, data: bytes) -> Job:
        slot, slot_rows, pieces, failures, weights = json.loads(data)
        return cls(
            slot=slot,
            slot_rows=slot_rows,
            pieces=[Piece(*fields) for fields in pieces],
            failures=[Failure(*fields) for fields in failures],
            weights=weights,
        )


class Report(NamedTuple):
    """What became of one job. Added up in the scheduler's counters."""

    pieces: int = 0  # dumps written whole
    rows: int = 0
    dump_bytes: int = 0
    errors: int = 0  # pieces that became error records
    errors_lost: int = 0  # error records that could not be written
    write_seconds: float = 0.0

    def encode(self) -> bytes:
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, data: bytes) -> Report:
        return cls(*json.loads(data))


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

"""The messages between a scheduler process and its writer processes. Standard library only.

One datagram is one message, as JSON. To a writer: a `Job`. Back, once for each job: a `Report`.
Records that are made for every request of every forward are tuples, which JSON encodes without a
conversion: the scheduler pays for that time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, NamedTuple

from server_patch.directory import Directory
from server_patch.dump_dir import RankDir
from server_patch.dump_format import StateLayout

#: Most pieces in one job: a job of such pieces is far smaller than a socket's buffer.
MAX_PIECES: Final = 64
#: Bytes that hold any message.
MAX_MESSAGE_BYTES: Final = 1 << 20


class FailedPiece(NamedTuple):
    """One error record to write."""

    rid: str
    start: int
    reason: str
    counter: int


class SlotPiece(NamedTuple):
    """One dump to write: rows of a slot."""

    rid: str
    start: int  # position in the prompt of the first row
    begin: int  # first row within the slot
    rows: int
    counter: int

    def failed(self, reason: str) -> FailedPiece:
        """The error record in place of the dump, with its number."""
        return FailedPiece(self.rid, self.start, reason, self.counter)


class Job(NamedTuple):
    """Files to write from one slot; `slot` is None if there are only failures."""

    slot: int | None
    slot_rows: int = 0  # rows the slot was filled with: they place its sections
    pieces: Sequence[SlotPiece] = ()
    failures: Sequence[FailedPiece] = ()
    weights: str | None = None  # id of the weights that computed the rows

    def encode(self) -> bytes:
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, data: bytes) -> Job:
        slot, slot_rows, pieces, failures, weights = json.loads(data)
        return cls(
            slot=slot,
            slot_rows=slot_rows,
            pieces=[SlotPiece(*fields) for fields in pieces],
            failures=[FailedPiece(*fields) for fields in failures],
            weights=weights,
        )


class Report(NamedTuple):
    """The outcome of one job. The scheduler adds the reports up."""

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
class RingPlan:
    """Sizes of a ring."""

    num_slots: int
    slot_rows: int  # tokens that fit in one slot
    slot_bytes: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The configuration of the writer processes of one rank."""

    rank_dir: RankDir
    states: StateLayout
    ring: RingPlan
    ring_descriptor: int  # of its memory
    log_level: str | None = None  # of lines about single requests; None: there are none

    @property
    def descriptors(self) -> tuple[int, int]:
        """Open descriptors that a writer process needs: of the memory and of the directory."""
        return self.ring_descriptor, self.rank_dir.directory.descriptor

    def encode(self, *, writer: str) -> str:
        """For the writer process with that token, which inherits `descriptors`."""
        rank_dir = self.rank_dir
        document = {
            "rank_dir": {
                "directory": [rank_dir.directory.descriptor, str(rank_dir.directory.path)],
                "boot_id": rank_dir.boot_id,
                "rank": rank_dir.rank,
                "file_mode": rank_dir.file_mode,
                "writer": writer,
            },
            "states": asdict(self.states),
            "ring": asdict(self.ring),
            "ring_descriptor": self.ring_descriptor,
            "log_level": self.log_level,
        }
        return json.dumps(document)

    @classmethod
    def decode(cls, text: str) -> Assignment:
        document = json.loads(text)
        rank_dir, states = document["rank_dir"], document["states"]
        descriptor, path = rank_dir["directory"]
        return cls(
            rank_dir=RankDir(**{**rank_dir, "directory": Directory(descriptor, Path(path))}),
            states=StateLayout(**{**states, "boundaries": tuple(states["boundaries"])}),
            ring=RingPlan(**document["ring"]),
            ring_descriptor=document["ring_descriptor"],
            log_level=document["log_level"],
        )

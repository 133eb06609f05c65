"""The values that cross the manifest's boundary: what is written to it and read from it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from manifest.states import Event, Reason, State


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One input file of the run."""

    number: int  # position on the command line, from 0
    path: str
    size_bytes: int
    digest: str  # xxh3-128 of the content
    num_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerStart:
    """One server start that a session extracted from."""

    number: int  # from 0, in the order of use
    session: int  # from 0; `extractor run` begins one, and another after it lost all servers
    used_at: str  # ISO 8601, UTC: the time of its canary check
    url: str
    boot_id: str
    facts: Mapping[str, Any]  # as announced by the server: extractor/servers/server_facts.py
    canary_error: float | None  # against the canary before it; None if there was none
    accepted: tuple[str, ...] = ()  # names of facts that the user allowed to change here


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A row became a prompt."""

    ordinal: int  # position among all input rows, from 0
    source: int  # number of its Source
    line: int  # from 1
    label: str | None  # the row's own id, as JSON
    key: str  # digest of ids and mask
    num_tokens: int
    num_trained: int  # ones in the loss mask
    part: int | None = None  # which of the prompts that the row expands to
    alterations: tuple[str, ...] = ()  # what was changed on the way from the row to the prompt
    detail: str | None = None  # more about that


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """A row gave no prompt, or one that must not be sent."""

    ordinal: int
    source: int
    line: int
    label: str | None
    reason: Reason
    detail: str
    key: str | None = None
    num_tokens: int | None = None
    part: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """A prompt went through one of the events that carry no data of their own."""

    ordinal: int
    event: Event  # SEND, DUMP, ADOPT, VERIFY, RETRY or LOSE
    attempts: int  # requests made for it so far, over all sessions


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A prompt's sample is durable at [offset, offset + size_bytes) of its shard."""

    event: ClassVar = Event.STORE
    ordinal: int
    shard: int
    offset: int  # bytes from the start of the shard file
    size_bytes: int
    digest: str  # xxh3-128 of those bytes
    num_pieces: int
    server: int | None = None  # number of the ServerStart that computed it


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """A prompt is given up."""

    event: ClassVar = Event.FAIL
    ordinal: int
    reason: Reason
    detail: str
    attempts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Relocated:
    """A stored sample's bytes were copied to another place."""

    event: ClassVar = Event.MOVE
    ordinal: int
    shard: int
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Forgotten:
    """A stored sample's bytes are gone or damaged."""

    event: ClassVar = Event.FORGET
    ordinal: int


Change = Planned | Rejected | Moved | Stored | Failed | Relocated | Forgotten


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One shard file."""

    number: int
    name: str  # its file name once sealed
    data_start: int  # bytes before the first sample: room for the header
    is_sealed: bool
    size_bytes: int  # durable bytes: end of its last sample
    num_samples: int
    digest: str | None = None  # of a sealed one: see extractor/shards/format.py


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """All the manifest knows of one input row."""

    ordinal: int
    source: int
    line: int
    label: str | None
    key: str | None
    num_tokens: int | None
    num_trained: int | None
    state: State
    reason: Reason | None
    detail: str | None
    attempts: int
    shard: int | None
    offset: int | None
    size_bytes: int | None
    digest: str | None
    num_pieces: int | None
    part: int | None = None
    alterations: tuple[str, ...] = ()
    server: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """The run in numbers."""

    by_state: dict[State, int]
    by_reason: dict[Reason, int]
    stored_tokens: int
    stored_bytes: int
    untrained: int  # stored samples whose mask is 0 throughout: they teach a drafter nothing
    by_alteration: dict[str, int] = field(default_factory=dict)  # stored samples it was done to

    @property
    def num_rows(self) -> int:
        return sum(self.by_state.values())

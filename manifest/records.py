"""The values that are written to the manifest and read from it. Pure.

`of`: the state in which a row can undergo the change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from manifest.states import Reason, State


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
class SourceRow:
    """The place of a row, or of a prompt that it expands to, in the input."""

    ordinal: int  # position among all input rows, from 0
    source: int  # number of its Source
    line: int  # from 1
    label: str | None = None  # the row's own id, as JSON
    part: int | None = None  # which of the prompts that the row expands to


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptFacts:
    """The facts of a prompt by which a later session recognises it."""

    key: str  # digest of ids and mask
    num_tokens: int
    num_trained: int | None  # ones in the loss mask; None for some rejected rows
    alterations: tuple[str, ...] = ()  # changes on the way from the row to the prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSample:
    """A durable sample at [offset, offset + size_bytes) of its shard."""

    shard: int
    offset: int  # bytes from the start of the shard file
    size_bytes: int
    digest: str  # xxh3-128 of those bytes
    num_pieces: int
    server: int | None = None  # number of the ServerStart that computed it

    @property
    def end(self) -> int:
        """Bytes from the start of the shard file to the end of the sample."""
        return self.offset + self.size_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A row became a prompt."""

    origin: SourceRow
    prompt: PromptFacts
    detail: str | None = None  # about the alterations

    @property
    def ordinal(self) -> int:
        return self.origin.ordinal


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """A row gave no prompt, or one that must not be sent."""

    origin: SourceRow
    reason: Reason
    detail: str
    prompt: PromptFacts | None = None

    @property
    def ordinal(self) -> int:
        return self.origin.ordinal


@dataclass(frozen=True, kw_only=True, slots=True)
class Retried:
    """An attempt failed, and the prompt is sent again."""

    of: ClassVar = State.PLANNED
    ordinal: int
    attempts: int  # requests made for it so far, over all sessions


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """A server died while it had the prompt's request."""

    of: ClassVar = State.PLANNED
    ordinal: int
    attempts: int  # as in Retried


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A prompt's sample is durable."""

    of: ClassVar = State.PLANNED
    ordinal: int
    sample: StoredSample
    attempts: int  # as in Retried


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """A prompt is given up."""

    of: ClassVar = State.PLANNED
    ordinal: int
    reason: Reason
    detail: str
    attempts: int  # as in Retried


@dataclass(frozen=True, kw_only=True, slots=True)
class Relocated:
    """A stored sample's bytes were copied to another place."""

    of: ClassVar = State.STORED
    ordinal: int
    shard: int
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Forgotten:
    """A stored sample's bytes are gone or damaged."""

    of: ClassVar = State.STORED
    ordinal: int


Change = Planned | Rejected | Retried | Lost | Stored | Failed | Relocated | Forgotten


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One shard file."""

    number: int
    data_start: int  # bytes before the first sample: room for the header
    is_sealed: bool
    size_bytes: int  # durable bytes: end of its last sample
    num_samples: int
    digest: str | None = None  # of a sealed one: see extractor/shards/format.py

    @property
    def name(self) -> str:
        """Its file name once sealed. Made from the number: no name in a file becomes a path."""
        return shard_name(self.number)


def shard_name(number: int) -> str:
    return f"shard-{number:06d}.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Everything that the manifest records of one input row."""

    origin: SourceRow
    prompt: PromptFacts | None  # None if the row gave none
    state: State = State.PLANNED
    reason: Reason | None = None  # of a failed row
    detail: str | None = None  # about the reason or the alterations
    attempts: int = 0  # as in Retried; those that a crash cut off are not counted
    num_deaths: int = 0  # servers that died while they had its request
    sample: StoredSample | None = None  # of a stored row

    @property
    def ordinal(self) -> int:
        return self.origin.ordinal


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRow:
    """A stored row: its prompt and its sample."""

    ordinal: int
    prompt: PromptFacts
    sample: StoredSample


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """The rows of a data set, counted."""

    by_state: dict[State, int] = field(default_factory=dict)
    by_reason: dict[Reason, int] = field(default_factory=dict)
    stored_tokens: int = 0
    stored_bytes: int = 0
    untrained: int = (
        0  # stored samples whose mask is 0 throughout: a drafter learns nothing from them
    )
    by_alteration: dict[str, int] = field(default_factory=dict)  # stored samples with each

    @property
    def num_rows(self) -> int:
        return sum(self.by_state.values())

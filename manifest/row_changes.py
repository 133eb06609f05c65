"""What a batch of changes makes of the rows that it touches: pure.

A row goes through five changes on its way, several of them often in one batch. They are applied one
after the other to an `Entry` in memory, by the table of `states`, so that the file gets each row
once, as it is at the end of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from manifest.exceptions import PromptChanged
from manifest.records import (
    Change,
    Failed,
    Forgotten,
    Moved,
    Planned,
    Rejected,
    Relocated,
    Stored,
)
from manifest.states import Event, IllegalTransition, Reason, State, advance

#: The alteration of a prompt that was cut.
TRUNCATED = "truncated"
PROMPT_CHANGED = (
    "What is stored is sound, but something has changed that the data set does not record, such as "
    "the version of a package. Use what the data set was begun with, or another --out."
)
#: Most rows that are remembered between batches, about 1 KB each.
MAX_REMEMBERED = 4_000


@dataclass(slots=True, kw_only=True)
class Entry:
    """A row of the table `prompts`: a field for each column, in the file's own form."""

    ordinal: int
    source: int
    line: int
    label: str | None
    part: int | None
    key: str | None
    num_tokens: int | None
    num_trained: int | None = None
    alterations: str | None = None  # separated by commas
    state: State = State.PLANNED
    detail: str | None = None
    reason: Reason | None = None
    attempts: int = 0
    num_deaths: int = 0
    shard: int | None = None
    offset: int | None = None
    size_bytes: int | None = None
    digest: str | None = None
    num_pieces: int | None = None
    server: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a batch of changes comes to."""

    entries: list[Entry]  # the rows that it touches, as they are behind it
    shards: list[int]  # those that any of these rows lay in before, or lie in now


class Rows:
    """The rows of one writer: those in flight are remembered, others are loaded when needed.

    load: ordinals -> the entries of those that the file has.
    first_free: how many ordinals the file may know; every row at or above is new.
    """

    def __init__(
        self, load: Callable[[Sequence[int]], Iterable[Entry]], *, first_free: int
    ) -> None:
        self._load = load
        self._first_free = first_free
        self._entries: dict[int, Entry] = {}

    def fold(self, changes: Sequence[Change]) -> Batch:
        """Fold `changes`, in order, into a batch of the rows that they touch.

        Raises IllegalTransition when a change does not follow from the state that its row is in,
        PromptChanged when a row's prompt differs from the planned one. Do not use this object after
        that, or after the batch could not be written.
        """
        entries = self._entries
        shards: set[int | None] = set()
        touched = dict.fromkeys(change.ordinal for change in changes)
        missing = [n for n in touched if n not in entries and n < self._first_free]
        for entry in self._load(missing) if missing else ():
            entries[entry.ordinal] = entry
            shards.add(entry.shard)  # none that is remembered lies in any
        for change in changes:
            entries[change.ordinal] = evolve(entries.get(change.ordinal), change)
        written = [entries[n] for n in touched]
        shards.update(entry.shard for entry in written)
        self._first_free = max(self._first_free, max(touched) + 1)
        return Batch(entries=written, shards=[n for n in shards if n is not None])

    def forget_settled(self, written: Iterable[Entry]) -> None:
        """`written` are in the file: remember only what more is to come of, and not too much."""
        for entry in written:
            if entry.state.is_terminal:
                del self._entries[entry.ordinal]
        if len(self._entries) > MAX_REMEMBERED:
            self._entries.clear()


def evolve(entry: Entry | None, change: Change) -> Entry:
    """The row after `change`: `entry` itself, altered, or a new one. Raises IllegalTransition."""
    if isinstance(change, Planned | Rejected):
        return _begin(change) if entry is None else _begin_again(entry, change)
    if entry is None:
        raise IllegalTransition(f"{change.event} for row {change.ordinal}, which was never planned")
    entry.state = advance(entry.state, change.event)
    match change:
        case Moved():
            entry.attempts = change.attempts
            entry.num_deaths += change.event is Event.LOSE
        case Stored():
            entry.shard, entry.offset = change.shard, change.offset
            entry.size_bytes, entry.digest = change.size_bytes, change.digest
            entry.num_pieces, entry.server = change.num_pieces, change.server
        case Failed():
            entry.reason, entry.detail = change.reason, _text(change.detail)
            entry.attempts = change.attempts
        case Relocated():
            entry.shard, entry.offset = change.shard, change.offset
        case Forgotten():
            entry.shard = entry.offset = entry.size_bytes = entry.num_pieces = None
            entry.digest = entry.server = None
    return entry


def _begin(change: Planned | Rejected) -> Entry:
    entry = Entry(
        ordinal=change.ordinal,
        source=change.source,
        line=change.line,
        label=change.label,
        part=change.part,
        key=change.key,
        num_tokens=change.num_tokens,
    )
    return _begin_again(entry, change)


def _begin_again(entry: Entry, change: Planned | Rejected) -> Entry:
    if entry.state.is_terminal:
        raise IllegalTransition(f"row {change.ordinal} is settled already")
    entry.detail = _text(change.detail)
    if isinstance(change, Rejected):
        entry.state, entry.reason = State.FAILED, change.reason
        return entry
    names = (entry.alterations or "").split(",")
    # A prompt is cut to the server's limit, which may have changed since.
    is_cut = TRUNCATED in names or TRUNCATED in change.alterations
    if entry.key not in (None, change.key) and not is_cut:
        raise PromptChanged(
            f"row {change.ordinal} (line {change.line} of its file) gives another prompt than in "
            f"an earlier session: {entry.num_tokens} tokens then, {change.num_tokens} now. "
            f"{PROMPT_CHANGED}"
        )
    entry.state, entry.key = State.PLANNED, change.key
    entry.num_tokens, entry.num_trained = change.num_tokens, change.num_trained
    entry.alterations = ",".join(change.alterations) or None
    return entry


def _text(detail: str | None) -> str | None:
    # A message may quote what a row holds, and SQLite ends a JSON string at a NUL.
    return detail.replace("\0", "\N{SYMBOL FOR NULL}") if detail else detail

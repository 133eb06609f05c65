"""Applies batches of changes to rows in memory, so that the file gets each row once. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from manifest.exceptions import PromptChanged
from manifest.records import (
    Change,
    Failed,
    Forgotten,
    Lost,
    Planned,
    Rejected,
    Relocated,
    Retried,
    Row,
    Stored,
)
from manifest.states import IllegalTransition, State

#: The alteration of a prompt that was cut: `prompts.types.Alteration.TRUNCATED`.
TRUNCATED = "truncated"
PROMPT_CHANGED = (
    "The stored samples are sound, but something has changed that the data set does not record, "
    "such as the version of a package. Use the original versions, or another --out."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch:
    """The rows that a batch of changes touches."""

    rows: list[Row]  # in their form after the batch
    shards: list[int]  # that hold a sample of these rows, before the batch or after it


class RowCache:
    """The rows of one writer: unfinished ones are remembered, others are loaded when needed.

    load: ordinals -> the rows of those that the file has.
    first_free: an ordinal above all in the file.
    max_remembered: rows between batches, of about 1 KB each.
    """

    def __init__(
        self,
        load: Callable[[Sequence[int]], Iterable[Row]],
        *,
        first_free: int,
        max_remembered: int = 4_000,
    ) -> None:
        self._load = load
        self._first_free = first_free
        self._max_remembered = max_remembered
        self._rows: dict[int, Row] = {}

    def fold(self, changes: Sequence[Change]) -> RowBatch:
        """Fold `changes`, in order, into a batch of the rows that they touch.

        Raises IllegalTransition when a change does not follow from the state that its row is in,
        PromptChanged when a row's prompt differs from the planned one. Do not use this object after
        that, or after the batch could not be written.
        """
        rows = self._rows
        touched = dict.fromkeys(change.ordinal for change in changes)
        missing = [n for n in touched if n not in rows and n < self._first_free]
        loaded = list(self._load(missing)) if missing else []
        rows.update((row.ordinal, row) for row in loaded)
        for change in changes:
            rows[change.ordinal] = evolve(rows.get(change.ordinal), change)
        written = [rows[n] for n in touched]
        # A remembered row is unfinished, and so in no shard.
        shards = {row.sample.shard for row in (*loaded, *written) if row.sample is not None}
        self._first_free = max(self._first_free, max(touched) + 1)
        return RowBatch(rows=written, shards=list(shards))

    def forget_settled(self, written: Iterable[Row]) -> None:
        """Forget the terminal rows of a batch that is in the file; bounds the memory."""
        for row in written:
            if row.state.is_terminal:
                del self._rows[row.ordinal]
        if len(self._rows) > self._max_remembered:
            self._rows.clear()


def evolve(row: Row | None, change: Change) -> Row:
    """The row after `change`. Raises IllegalTransition, PromptChanged."""
    if isinstance(change, Planned | Rejected):
        return _begin(row, change)
    if row is None or row.state is not change.of:
        state = "not planned" if row is None else row.state
        raise IllegalTransition(
            f"{type(change).__name__} of row {change.ordinal}, which is {state}"
        )
    match change:
        case Retried():
            return replace(row, attempts=change.attempts)
        case Lost():
            return replace(row, attempts=change.attempts, num_deaths=row.num_deaths + 1)
        case Stored():
            return replace(row, state=State.STORED, sample=change.sample, attempts=change.attempts)
        case Failed():
            return replace(
                row,
                state=State.FAILED,
                reason=change.reason,
                detail=_text(change.detail),
                attempts=change.attempts,
            )
        case Relocated():
            assert row.sample is not None
            return replace(
                row, sample=replace(row.sample, shard=change.shard, offset=change.offset)
            )
        case Forgotten():
            return replace(row, state=State.PLANNED, sample=None)


def _begin(row: Row | None, change: Planned | Rejected) -> Row:
    if row is not None and row.state.is_terminal:
        raise IllegalTransition(f"row {change.ordinal} is settled already")
    detail = _text(change.detail)
    if isinstance(change, Rejected):
        row = row or Row(origin=change.origin, prompt=change.prompt)
        return replace(row, state=State.FAILED, reason=change.reason, detail=detail)
    if row is None:
        return Row(origin=change.origin, prompt=change.prompt, detail=detail)
    before, prompt = row.prompt, change.prompt
    if before is not None and before.key != prompt.key:
        # A prompt is cut to the server's limit, which may have changed since.
        if TRUNCATED not in (*before.alterations, *prompt.alterations):
            raise PromptChanged(
                f"row {change.ordinal} (line {row.origin.line} of its file) gives another prompt "
                f"than in an earlier session: {before.num_tokens} tokens then, {prompt.num_tokens} "
                f"now. {PROMPT_CHANGED}"
            )
    return replace(row, prompt=prompt, detail=detail)


def _text(detail: str | None) -> str | None:
    # A message may quote the row's text, and SQLite ends a JSON string at a NUL.
    return detail.replace("\0", "\N{SYMBOL FOR NULL}") if detail else detail

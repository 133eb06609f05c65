"""Ties pieces to prompts by rid, whatever their order, and tells when they are whole. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

Handle = TypeVar("Handle")


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece(Generic[Handle]):
    """Rows [start, start + rows) of one request; `handle` is whatever the caller reads them by."""

    start: int
    rows: int
    handle: Handle

    @property
    def end(self) -> int:
        return self.start + self.rows


class Match(StrEnum):
    """How the pieces of a request cover the rows of its prompt."""

    WAITING = "waiting"  # no conflict, but rows are still missing
    COMPLETE = "complete"  # every row exactly once
    CONFLICT = "conflict"  # some row twice, or rows outside of the prompt
    ORPHAN = "orphan"  # nobody waits for the request (any more)


def tile(pieces: Iterable[Piece[Handle]], num_tokens: int) -> Match:
    """How `pieces`, in any order, cover the rows [0, num_tokens)."""
    position = covered = 0
    for piece in sorted(pieces, key=lambda piece: (piece.start, piece.rows)):
        if piece.start < position or piece.rows < 1 or piece.end > num_tokens:
            return Match.CONFLICT
        position = piece.end
        covered += piece.rows
    return Match.COMPLETE if covered == num_tokens else Match.WAITING


@dataclass(slots=True)
class _Expected(Generic[Handle]):
    num_tokens: int
    pieces: list[Piece[Handle]] = field(default_factory=list)


class Correlator(Generic[Handle]):
    """The requests in flight and the pieces seen of each. Memory: one entry per request in flight.

    >>> correlator = Correlator[str]()
    >>> correlator.expect("rid-1", num_tokens=5)
    >>> correlator.add("rid-1", Piece(start=3, rows=2, handle="b"))
    <Match.WAITING: 'waiting'>
    >>> correlator.add("rid-1", Piece(start=0, rows=3, handle="a"))
    <Match.COMPLETE: 'complete'>
    >>> [piece.handle for piece in correlator.close("rid-1")]
    ['a', 'b']
    """

    def __init__(self) -> None:
        self._expected: dict[str, _Expected[Handle]] = {}

    def expect(self, rid: str, *, num_tokens: int) -> None:
        """Start waiting for `rid`. A rid names one attempt, so it is expected once only."""
        if rid in self._expected:
            raise ValueError(f"rid {rid!r} is expected already")
        self._expected[rid] = _Expected(num_tokens=num_tokens)

    def add(self, rid: str, piece: Piece[Handle]) -> Match:
        """Note a piece of `rid`. A conflicting piece is kept too, so that `close` returns it."""
        expected = self._expected.get(rid)
        if expected is None:
            return Match.ORPHAN
        expected.pieces.append(piece)
        return tile(expected.pieces, expected.num_tokens)

    def rows_seen(self, rid: str) -> int:
        return sum(piece.rows for piece in self._expected[rid].pieces)

    def rows_due(self, rid: str) -> int:
        """Rows that have not arrived yet."""
        return self._expected[rid].num_tokens - self.rows_seen(rid)

    def close(self, rid: str) -> list[Piece[Handle]]:
        """Stop waiting for `rid`; its pieces so far, by start. Later pieces are orphans."""
        expected = self._expected.pop(rid, None)
        return [] if expected is None else sorted(expected.pieces, key=lambda piece: piece.start)

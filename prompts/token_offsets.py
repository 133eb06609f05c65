"""Spans of characters -> marks on tokens. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from prompts.types import RowError, RowReason

#: Start and end in a text, in characters; the end is one past the last.
Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class TokenPlaces:
    """Where a text's tokens lie in it, as the tokenizer tells. Asked for only what is needed."""

    all: Callable[[], Sequence[Span]]  # of each token
    token_at: Callable[[int], int | None]  # the (first) token that a character lies in
    of_token: Callable[[int], Span | None]  # of one token


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """A text's tokens, and what is known about where they lie in it."""

    text: str
    ids: Sequence[int]  # [N]
    places: TokenPlaces | None  # None where the tokenizer does not know
    encode_ids: Callable[[str], list[int]]  # what gave `ids` for `text`

    @cached_property
    def begins(self) -> npt.NDArray[np.int64]:
        """[N]: the first character of each token. Raises `RowError` (mask_failed)."""
        assert self.places is not None
        return _token_begins(self.text, self.places.all())


def mark_spans(encoding: Encoding, spans: Iterable[Span]) -> npt.NDArray[np.uint8]:
    """[N], 1 on the tokens that begin inside one of the spans.

    So a token that reaches into a span from before it is not marked (the model was given it), and
    one that reaches out over its end is (the model had to begin it).
    Raises `RowError` (mask_failed) where the tokens cannot be placed in the text with certainty.
    """
    mask = np.zeros(len(encoding.ids), dtype=np.uint8)
    for start, end in spans:
        mask[_count_before(encoding, start) : _count_before(encoding, end)] = 1
    return mask


def has_split_start(encoding: Encoding, spans: Iterable[Span]) -> bool:
    """Whether a token reaches into a span from before it, so that `mark_spans` leaves it out.

    Raises `RowError` as that does.
    """
    return any(_is_split(encoding, start) for start, end in spans if start < end)


def _is_split(encoding: Encoding, position: int) -> bool:
    if encoding.places is None or _count_at_border(encoding.places, position) is not None:
        return False  # without places, a token across the border fails the row
    count = int(np.searchsorted(encoding.begins, position, side="left"))
    return count == len(encoding.begins) or int(encoding.begins[count]) > position


def _count_before(encoding: Encoding, position: int) -> int:
    """How many tokens begin before `position`."""
    if encoding.places is None:
        # The text before it alone must give the first tokens of the whole.
        head = encoding.encode_ids(encoding.text[:position])
        if head != list(encoding.ids[: len(head)]):
            raise RowError(RowReason.MASK_FAILED, "a token may lie across the border of a turn")
        return len(head)
    if (count := _count_at_border(encoding.places, position)) is not None:
        return count
    return int(np.searchsorted(encoding.begins, position, side="left"))


def _count_at_border(places: TokenPlaces, position: int) -> int | None:
    """The same where one token ends and the next begins exactly there: no other is looked at."""
    token = places.token_at(position)
    if not token:
        return None
    before, after = places.of_token(token - 1), places.of_token(token)
    if before is None or after is None or before[1] != position or after[0] != position:
        return None
    return token


def _token_begins(text: str, offsets: Sequence[Span]) -> npt.NDArray[np.int64]:
    """[N], never decreasing: the first character of each token.

    Byte-level tokenizers trim spaces off a token's offsets (` hi` is given as `hi`, a lone space as
    nothing at its end), so a token begins where the ones before it end, if that is earlier.
    Several tokens of one character all begin at it.
    """
    pairs = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    starts, ends = pairs[:, 0], pairs[:, 1]
    previous = np.concatenate((np.zeros(1, dtype=np.int64), ends))[: len(ends)]
    begins: npt.NDArray[np.int64] = np.minimum(starts, previous)
    # Only white space may lie in no token: some releases of tokenizers give useless offsets.
    num_uncovered = len(text) - (int(ends[-1]) if len(ends) else 0)
    num_uncovered += int(np.maximum(starts - previous, 0).sum())
    if np.any(np.diff(begins) < 0) or num_uncovered > len(text) - len("".join(text.split())):
        raise RowError(RowReason.MASK_FAILED, "the tokenizer's offsets do not cover the text")
    return begins

"""Spans of characters -> marks on tokens. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prompts.types import RowError, RowReason

#: Start and end in a text, in characters; the end is one past the last.
Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """A text's tokens, and what is known about where they lie in it."""

    text: str
    ids: Sequence[int]  # [N]
    offsets: Sequence[Span] | None  # [N] as the tokenizer gives them; None where it cannot
    encode_ids: Callable[[str], list[int]]  # what gave `ids` for `text`


def mark_spans(encoding: Encoding, spans: Iterable[Span]) -> npt.NDArray[np.uint8]:
    """[N], 1 on the tokens that begin inside one of the spans.

    So a token that reaches into a span from before it is not marked (the model was given it), and
    one that reaches out over its end is (the model had to begin it).
    Raises `RowError` (mask_failed) where the tokens cannot be placed in the text with certainty.
    """
    mask = np.zeros(len(encoding.ids), dtype=np.uint8)
    if encoding.offsets is None:
        for start, end in spans:
            mask[_count_before(encoding, start) : _count_before(encoding, end)] = 1
        return mask
    begins = _token_begins(encoding.text, encoding.offsets)
    for start, end in spans:
        first, last = np.searchsorted(begins, (start, end), side="left")
        mask[first:last] = 1
    return mask


def _count_before(encoding: Encoding, position: int) -> int:
    """How many tokens the text before `position` has, proven to be the first ones of the whole."""
    head = encoding.encode_ids(encoding.text[:position])
    if head != list(encoding.ids[: len(head)]):
        raise RowError(RowReason.MASK_FAILED, "a token may lie across the border of a turn")
    return len(head)


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

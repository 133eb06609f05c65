"""Spans of characters -> marks on tokens, from offsets as tokenizers really give them."""

from __future__ import annotations

import pytest

from prompts.token_offsets import Encoding, Span, TokenPlaces, has_split_start, mark_spans
from prompts.types import RowError, RowReason


def encoding_of(text: str, offsets: list[Span]) -> Encoding:
    def token_at(position: int) -> int | None:
        covering = (index for index, (a, b) in enumerate(offsets) if a <= position < b)
        return next(covering, None)

    places = TokenPlaces(
        all=lambda: offsets, token_at=token_at, of_token=lambda index: offsets[index]
    )
    return Encoding(text=text, ids=range(len(offsets)), places=places, encode_ids=lambda text: [])


def marks(text: str, offsets: list[Span], *spans: Span) -> list[int]:
    return [int(mark) for mark in mark_spans(encoding_of(text, offsets), spans)]


def test_tokens_that_begin_in_a_span_are_marked() -> None:
    assert marks("abcdef", [(0, 2), (2, 4), (4, 6)], (2, 4)) == [0, 1, 0]


def test_a_token_that_reaches_into_a_span_is_not_marked_and_one_that_reaches_out_is() -> None:
    assert marks("abcdef", [(0, 3), (3, 6)], (2, 5)) == [0, 1]


@pytest.mark.parametrize(
    ("offsets", "start", "is_split"),
    [
        ([(0, 3), (3, 6)], 2, True),
        ([(0, 3), (3, 6)], 3, False),
        ([(0, 2), (3, 6)], 2, False),  # a space trimmed off
        ([(0, 6)], 2, True),
        ([(0, 2), (2, 3), (2, 3), (3, 6)], 2, False),
    ],
)
def test_a_token_across_the_start_of_a_span_is_told(
    offsets: list[Span], start: int, is_split: bool
) -> None:
    assert has_split_start(encoding_of("a: hi!", offsets), [(start, 6)]) is is_split


def test_a_space_trimmed_off_the_offsets_still_belongs_to_its_word() -> None:
    # "a: hi" with tokens "a", ":", " hi", where the span begins at the space.
    assert marks("a: hi", [(0, 1), (1, 2), (3, 5)], (2, 5)) == [0, 0, 1]


def test_a_lone_space_with_empty_offsets_lies_before_its_end() -> None:
    # "a: 7" with tokens "a", ":", " ", "7".
    offsets = [(0, 1), (1, 2), (3, 3), (3, 4)]
    assert marks("a: 7", offsets, (2, 4)) == [0, 0, 1, 1]
    assert marks("a: 7", offsets, (3, 4)) == [0, 0, 0, 1]


def test_all_tokens_of_one_character_share_its_fate() -> None:
    offsets = [(0, 1), (1, 2), (1, 2), (1, 2), (2, 3)]
    assert marks("a🦜b", offsets, (1, 2)) == [0, 1, 1, 1, 0]
    assert marks("a🦜b", offsets, (2, 3)) == [0, 0, 0, 0, 1]


def test_several_spans_are_marked() -> None:
    assert marks("abcd", [(0, 1), (1, 2), (2, 3), (3, 4)], (0, 1), (2, 3)) == [1, 0, 1, 0]


def test_no_tokens_give_no_marks() -> None:
    assert marks("", [], (0, 0)) == []


@pytest.mark.parametrize(
    "offsets",
    [
        [(0, 0), (0, 0), (0, 0)],  # empty throughout
        [(2, 2), (2, 2), (6, 6)],  # only ends, as some releases give for Llama 3
        [(0, 2), (2, 4)],  # the end is missing
        [(1, 3), (3, 6)],  # the beginning is missing
        [(2, 4), (0, 2), (4, 6)],  # not in order
    ],
)
def test_offsets_that_do_not_cover_the_text_fail_the_row(offsets: list[Span]) -> None:
    with pytest.raises(RowError) as caught:
        marks("abcdef", offsets, (2, 4))
    assert caught.value.reason == RowReason.MASK_FAILED

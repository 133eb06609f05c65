"""Which characters of a rendered conversation the model itself had to produce.

That is, for each assistant turn, everything after the generation prompt up to and including the
marker that ends the turn; not the role header, not the line break after the marker. A reasoning
block that the template writes there, even an empty one, is part of it.

A template with `{% generation %}` blocks says so itself. For any other, a span is taken only where
both of its borders are proven on the row at hand:

- The start is where the turns before it, rendered with a generation prompt, end.
- The end is where the turns up to it, rendered, end.

That needs renderings that begin as the whole one does. Some templates write a turn differently once
others follow (Qwen3 drops reasoning), or open it in a way no finished turn begins (DeepSeek-R1), or
know no generation prompt. Then a *stand-in* decides: the conversation rendered again, with this
turn's content replaced by a word that occurs nowhere in it. What is equal before and after the word
is not content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from prompts.align import Span
from prompts.tokenizer import ChatTokenizer
from prompts.turns import Turn
from prompts.types import RowError, RowReason

#: Templates may drop what stands before this; see `_shown`.
REASONING_END: Final = "</think>"


def assistant_spans(
    tokenizer: ChatTokenizer, turns: Sequence[Turn], text: str, *, generation_prompt: bool
) -> list[Span]:
    """The trained spans of `text`, which is `turns` rendered: in characters, in order, apart.

    Raises `RowError` (mask_failed) where the borders of an assistant turn cannot be proven, and
    (render_failed) where the template cannot render a part of the conversation.
    """
    indices = [index for index, turn in enumerate(turns) if turn.role == "assistant"]
    if not indices:
        return []
    if tokenizer.has_generation_blocks:
        spans = [
            _trimmed(text, span, tokenizer.generation_prompt)
            for span in tokenizer.generation_spans(turns, text, generation_prompt=generation_prompt)
        ]
        if len(spans) != len(indices):
            detail = f"{len(spans)} generation blocks for {len(indices)} assistant turns"
            raise RowError(RowReason.MASK_FAILED, detail)
    else:
        spans = [_Locator(tokenizer, turns, text, index).span() for index in indices]
    _check(turns, text, indices, spans)
    return spans


class _Locator:
    """Finds one assistant turn, `turns[index]`, in the rendering of all of them."""

    def __init__(
        self, tokenizer: ChatTokenizer, turns: Sequence[Turn], text: str, index: int
    ) -> None:
        self._tokenizer = tokenizer
        self._turns = turns
        self._text = text
        self._index = index

    def span(self) -> Span:
        return self._start(), self._end()

    def _start(self) -> int:
        if self._tokenizer.generation_prompt:
            position = self._end_of(self._turns[: self._index], generation_prompt=True)
            if position is not None:
                return position
        before, _ = self._around_stand_in(self._turns)
        if not self._text.startswith(before):
            raise self._failure("begins")
        # The space after `Assistant:` is the first character of the first word's token.
        return len(before.rstrip(" "))

    def _end(self) -> int:
        turns = self._turns[: self._index + 1]
        position = self._end_of(turns, generation_prompt=False)
        if position is not None:
            return len(self._text[:position].rstrip())
        _, after = self._around_stand_in(self._turns)
        _, closing = self._around_stand_in(turns)
        marker = closing.rstrip()
        if not marker or not after.startswith(marker) or not self._text.endswith(after):
            raise self._failure("ends")
        return len(self._text) - len(after) + len(marker)

    def _end_of(self, turns: Sequence[Turn], *, generation_prompt: bool) -> int | None:
        """Where the first turns end in the text, if the text begins as they alone render."""
        if len(turns) == len(self._turns):
            return len(self._text)
        try:
            head = self._tokenizer.render(turns, generation_prompt=generation_prompt)
        except RowError:  # the template wants more turns than these
            return None
        return len(head) if self._text.startswith(head) else None

    def _around_stand_in(self, turns: Sequence[Turn]) -> tuple[str, str]:
        """What the template writes before and after this turn's content in `turns`."""
        word = "standin"
        while word in self._text:
            word += "x"
        stand_in = replace(turns[self._index], content=word)
        turns = [*turns[: self._index], stand_in, *turns[self._index + 1 :]]
        # As for the whole row: a conversation that its last turn leaves open asks for an answer.
        text = self._tokenizer.render(turns, generation_prompt=turns[-1].role != "assistant")
        before, found, after = text.partition(word)
        if not found or word in after:
            raise self._failure("lies")
        return before, after

    def _failure(self, verb: str) -> RowError:
        detail = f"turn {self._index} (assistant): cannot prove where it {verb} in the rendering"
        return RowError(RowReason.MASK_FAILED, detail)


def _check(turns: Sequence[Turn], text: str, indices: Sequence[int], spans: Sequence[Span]) -> None:
    for index, (start, end) in zip(indices, spans, strict=True):
        if _shown(turns[index]) not in text[start:end]:
            detail = f"turn {index} (assistant): its content is not where it should be"
            raise RowError(RowReason.MASK_FAILED, detail)


def _shown(turn: Turn) -> str:
    """The part of an assistant turn that every template shows: what follows the reasoning."""
    return turn.content.rpartition(REASONING_END)[2].strip()


def _trimmed(text: str, span: Span, header: str) -> Span:
    """The span without final space, and without the role header, which some templates mark too."""
    start, end = span
    if header and text.startswith(header, start, end):
        start += len(header)
    return start, start + len(text[start:end].rstrip())

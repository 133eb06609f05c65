"""Which characters of a rendered conversation the model itself had to produce.

That is, for each assistant turn, everything after the generation prompt up to and including the
marker that ends the turn; not the role header, not the line break after the marker. A reasoning
block that the template writes there, even an empty one, is part of it, and so are tool calls.

A template with `{% generation %}` blocks says so itself. For any other, a span is taken only where
both of its borders are proven on the row at hand:

- The start is where the turns before it, rendered with a generation prompt, end.
- The end is where the turns up to it, rendered, end.

That needs renderings that begin as the whole one does. Some templates write a turn differently once
others follow (Qwen3 drops reasoning, gpt-oss closes the last answer with a marker of its own), or
move a system prompt on to the last question (Mistral), or open a turn in a way no finished turn
begins (DeepSeek-R1), or know no generation prompt. Then a *stand-in* decides: the conversation
rendered again, with this turn's content replaced by a word that occurs nowhere in it. What is equal
before and after the word is not content.

Most turns need no second rendering: where the header and the marker that the template was seen to
write stand around the turn's exact content, and the header occurs as often as there are assistant
turns, that is the proof (`_around_content`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

from prompts.conversation_parser import ChatTurn
from prompts.thinking import THINK_END, THINK_START, answer_of, reasoning_of, with_answer
from prompts.token_offsets import Span
from prompts.tokenizer import ChatTokenizer
from prompts.tools import ToolCall
from prompts.types import RowError, RowReason

#: Maximum turns to render again for one row. Locating an answer this way costs one or more
#: renderings of all turns; this many turns take most of a minute.
MAX_TURNS_RENDERED: Final = 1 << 20

#: What a template was seen to put around an answer: role header and end marker.
Frame = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """Turns and what the chat template made of them."""

    tokenizer: ChatTokenizer
    turns: Sequence[ChatTurn]
    tools: Sequence[Any]
    text: str = field(repr=False)
    generation_prompt: bool

    @cached_property
    def answers(self) -> list[int]:
        """Indices of the assistant turns."""
        return [index for index, turn in enumerate(self.turns) if turn.role == "assistant"]


class SpanFinder:
    """Finds assistant turns in renderings of one tokenizer's chat template."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._frame = _frame_of(tokenizer)

    def spans(self, rendering: Rendering, indices: Sequence[int]) -> list[Span]:
        """Where the assistant turns of those indices lie in the text: in characters.

        Raises `RowError` (mask_failed) where the borders of a turn cannot be proven, and
        (render_failed) where the template cannot render a part of the conversation.
        """
        if not indices:
            return []
        if self._tokenizer.has_generation_blocks:
            spans = _generation_spans(rendering, indices)
        else:
            found = self._around_content(rendering, indices)
            num_missing = sum(span is None for span in found)
            if num_missing * len(rendering.turns) > MAX_TURNS_RENDERED:
                detail = f"{num_missing} answers among {len(rendering.turns)} turns are too many"
                raise RowError(RowReason.ROW_TOO_LARGE, f"{detail} to locate: split the row")
            spans = [
                span or _Locator(rendering, index).span()
                for index, span in zip(indices, found, strict=True)
            ]
        for index, (start, end) in zip(indices, spans, strict=True):
            turn = rendering.turns[index]
            if THINK_END in (answer := answer_of(turn)):
                if _Locator(rendering, index).answer_start(answer.strip()) is None:
                    detail = (
                        f"turn {index} (assistant): the template cuts its answer at a {THINK_END} "
                        "in it: if that ends reasoning, write that into reasoning_content"
                    )
                    raise RowError(RowReason.MASK_FAILED, detail)
            if not is_shown(turn, rendering.text[start:end]):
                detail = f"turn {index} (assistant): its content is not where it should be"
                raise RowError(RowReason.MASK_FAILED, detail)
        return spans

    def end_marker(self, rendering: Rendering) -> str:
        """What the template writes behind the last turn's content. Raises `RowError`."""
        return _Locator(rendering, len(rendering.turns) - 1).closing()

    def _around_content(self, rendering: Rendering, indices: Sequence[int]) -> list[Span | None]:
        """The spans of plain answers between header and marker; None for uncertain ones."""
        text = rendering.text
        if self._frame is None:
            return [None] * len(indices)
        header, marker = self._frame
        starts = [found.end() for found in re.finditer(re.escape(header), text)]
        if len(starts) != len(rendering.answers) + rendering.generation_prompt:
            return [None] * len(indices)
        start_of = dict(zip(rendering.answers, starts, strict=False))
        return [
            _plain_span(text, start_of[index], rendering.turns[index], marker) for index in indices
        ]


def _plain_span(text: str, start: int, turn: ChatTurn, marker: str) -> Span | None:
    if turn.tool_calls or reasoning_of(turn):
        return None
    for content in (turn.content, turn.content.strip()):
        if text.startswith(content + marker, start):
            return start, start + len(content) + len(marker)
    return None


def without_thinking(rendering: Rendering, index: int, span: Span) -> Span:
    """The part of an assistant turn's span that follows its reasoning block.

    Raises `RowError` (mask_failed) where that cannot be told.
    """
    start, end = span
    reasoning = reasoning_of(rendering.turns[index])
    if not reasoning and not rendering.text[start:end].lstrip().startswith(THINK_START):
        return span
    position = answer_start(rendering, index, span)
    if position is None:
        if reasoning not in rendering.text[start:end]:
            return span
        detail = f"turn {index} (assistant): cannot prove where its reasoning ends"
        raise RowError(RowReason.MASK_FAILED, detail)
    head = rendering.text[start:position]
    is_shown_there = THINK_END in head or (reasoning and reasoning in head)
    return (position, end) if is_shown_there else span


def answer_start(rendering: Rendering, index: int, span: Span) -> int | None:
    """The position of an assistant turn's answer, after any reasoning that its span shows.

    None if it cannot be proven.
    """
    start, end = span
    turn, shown = rendering.turns[index], rendering.text[start:end]
    answer = answer_of(turn).strip()
    for reasoning in dict.fromkeys((reasoning_of(turn), "")):
        position = _behind_block(shown, reasoning)
        if position is not None and shown.startswith(answer, position):
            return start + position
    position = _behind_space(shown, 0)
    if shown.startswith(answer, position) and not turn.tool_calls:
        rest = shown[position + len(answer) :].strip()
        if not rest or rest in rendering.tokenizer.control_tokens:
            return start + position
    return _Locator(rendering, index).answer_start(answer) if answer else None


def _behind_block(shown: str, reasoning: str) -> int | None:
    """The position after the reasoning block at the start of the text; None without one."""
    position = _behind_space(shown, 0)
    if shown.startswith(THINK_START, position):
        position = _behind_space(shown, position + len(THINK_START))
    elif not reasoning:
        return None
    if not shown.startswith(reasoning, position):
        return None
    position = _behind_space(shown, position + len(reasoning))
    if not shown.startswith(THINK_END, position):
        return None
    return _behind_space(shown, position + len(THINK_END))


def _behind_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _frame_of(tokenizer: ChatTokenizer) -> Frame | None:
    """The header and the marker, where the template begins an answer as it asks for one."""
    header = tokenizer.generation_prompt
    if not header:
        return None
    word = "standin"
    turns = [ChatTurn(role="user", content="Hi"), ChatTurn(role="assistant", content=word)]
    turns += turns
    try:
        text = tokenizer.render(turns, generation_prompt=False)
    except RowError:
        return None
    _, found, rest = text.partition(header + word)
    last = text.rpartition(word)[2].rstrip()
    # An answer in the midst ends as the last one does, and it ends with something.
    return (header, last) if found and last and rest.startswith(last) else None


def _generation_spans(rendering: Rendering, indices: Sequence[int]) -> list[Span]:
    tokenizer = rendering.tokenizer
    spans = tokenizer.generation_spans(
        rendering.turns,
        rendering.text,
        generation_prompt=rendering.generation_prompt,
        tools=rendering.tools,
    )
    if len(spans) != len(rendering.answers):
        detail = f"{len(spans)} generation blocks for {len(rendering.answers)} assistant turns"
        raise RowError(RowReason.MASK_FAILED, detail)
    by_index = dict(zip(rendering.answers, spans, strict=True))
    header = tokenizer.generation_prompt
    return [_trimmed(rendering.text, by_index[index], header) for index in indices]


class _Locator:
    """Finds one assistant turn, `turns[index]`, in the rendering of all of them."""

    def __init__(self, rendering: Rendering, index: int) -> None:
        self._tokenizer = rendering.tokenizer
        self._rendering = rendering
        self._turns = rendering.turns
        self._text = rendering.text
        self._index = index

    def span(self) -> Span:
        return self._start(), self._end()

    def closing(self) -> str:
        """What follows the turn's content where it is the last one."""
        return self._around_stand_in(self._turns[: self._index + 1], as_content=True)[1]

    def _start(self) -> int:
        if self._tokenizer.generation_prompt:
            position = self._end_of(self._turns[: self._index], generation_prompt=True)
            if position is not None:
                return position
        before, _ = self._around_stand_in(self._turns, as_content=True)
        header = self._tokenizer.generation_prompt
        num_headers = self._rendering.answers.index(self._index) + 1
        if header and before.count(header) == num_headers:
            # What follows the header (a reasoning block, a channel) is the model's, too.
            before = before[: before.rindex(header) + len(header)]
            return self._proven(before)
        # The space after `Assistant:` is the first character of the first word's token.
        return self._proven(before.rstrip(" "))

    def _proven(self, before: str) -> int:
        if not self._text.startswith(before):
            raise self._failure("begins")
        return len(before)

    def _end(self) -> int:
        turns = self._turns[: self._index + 1]
        position = self._end_of(turns, generation_prompt=False)
        if position is not None:
            return len(self._text[:position].rstrip())
        is_call = bool(self._turns[self._index].tool_calls)
        _, after = self._around_stand_in(self._turns, as_content=not is_call)
        _, closing = self._around_stand_in(turns, as_content=not is_call)
        if not self._text.endswith(after):
            raise self._failure("ends")
        # Some templates write no marker at all: the next role's token ends the answer (GLM).
        marker = closing.rstrip()
        if not after.startswith(marker):
            marker = self._other_marker(marker, after)
        return len(self._text) - len(after) + len(marker)

    def _other_marker(self, closing: str, after: str) -> str:
        """The one control token that ends this turn in the midst of others, where the last turn
        ends with another one."""
        if closing in self._tokenizer.control_tokens:
            for token in self._tokenizer.control_tokens:
                if after.startswith(token):
                    return token
        raise self._failure("ends")

    def _end_of(self, turns: Sequence[ChatTurn], *, generation_prompt: bool) -> int | None:
        """Where the first turns end in the text, if the text begins as they alone render."""
        if len(turns) == len(self._turns):
            return len(self._text)
        try:
            head = self._render(turns, generation_prompt=generation_prompt)
        except RowError:  # the template wants more turns than these
            return None
        return len(head) if self._text.startswith(head) else None

    def _around_stand_in(self, turns: Sequence[ChatTurn], *, as_content: bool) -> tuple[str, str]:
        """What the template writes before and after a stand-in for this turn in `turns`.

        The stand-in takes the place of the content, or of the last call's arguments: what comes
        before it is written without reasoning and calls, what comes after it follows the turn's
        last part.
        """
        turn = turns[self._index]
        if as_content:
            word = self._unused_word()
            turn = replace(turn, content=word, reasoning=None, tool_calls=())
        else:
            number = 7310448
            while str(number) in self._text:
                number += 1
            word = str(number)  # unlike a string, a number has no quotes after it
            last = replace(turn.tool_calls[-1], arguments={"x": number}, text=None)
            turn = replace(turn, tool_calls=(*turn.tool_calls[:-1], last))
        turns = [*turns[: self._index], turn, *turns[self._index + 1 :]]
        # As for the whole row: a conversation that its last turn leaves open asks for an answer.
        text = self._render(turns, generation_prompt=turns[-1].role != "assistant")
        before, found, after = text.partition(word)
        if not found or word in after:
            raise self._failure("lies")
        return before, after

    def _unused_word(self) -> str:
        word = "standin"
        while word in self._text:
            word += "x"
        return word

    def answer_start(self, answer: str) -> int | None:
        """The position of the turn's answer, found by rendering another answer in its place."""
        word = self._unused_word()
        turns = list(self._turns)
        turns[self._index] = with_answer(turns[self._index], word)
        try:
            text = self._render(turns, generation_prompt=turns[-1].role != "assistant")
        except RowError:
            return None
        before, _, after = text.partition(word)
        middle = self._text[len(before) : len(self._text) - len(after)]
        if text.count(word) != 1 or before + middle + after != self._text:
            return None
        return len(before) + middle.index(answer) if middle.strip() == answer else None

    def _render(self, turns: Sequence[ChatTurn], *, generation_prompt: bool) -> str:
        return self._tokenizer.render(
            turns, generation_prompt=generation_prompt, tools=self._rendering.tools
        )

    def _failure(self, verb: str) -> RowError:
        detail = f"turn {self._index} (assistant): cannot prove where it {verb} in the rendering"
        return RowError(RowReason.MASK_FAILED, detail)


def is_shown(turn: ChatTurn, shown: str) -> bool:
    """Whether what every template shows of an assistant turn is there: answer, calls."""
    return answer_of(turn).strip() in shown and all(
        call_is_shown(call, shown) for call in turn.tool_calls
    )


def call_is_shown(call: ToolCall, shown: str) -> bool:
    """Whether a tool call's name is in the text, and all its values in one spelling or another."""
    return call.name in shown and all(
        _value_is_shown(text, shown) for text in _texts(call.arguments)
    )


def _value_is_shown(value: str, shown: str) -> bool:
    spellings = (value, json.dumps(value, ensure_ascii=False)[1:-1], json.dumps(value)[1:-1])
    return any(spelling in shown for spelling in spellings)


def _texts(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for item in value.values() for text in _texts(item)]
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return []


def _trimmed(text: str, span: Span, header: str) -> Span:
    """The span without final space, and without the role header, which some templates mark too."""
    start, end = span
    if header and text.startswith(header, start, end):
        start += len(header)
    return start, start + len(text[start:end].rstrip())

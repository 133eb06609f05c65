"""One conversation rendered, checked to be whole, and its trained spans found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import orjson

from prompts.assistant_spans import Rendering, SpanFinder, answer_start, is_shown, without_thinking
from prompts.conversation_parser import ChatTurn, Conversation
from prompts.reading_options import ReadingOptions, Thinking, Tools
from prompts.thinking import (
    THINK_END,
    THINK_START,
    answer_of,
    only_mentions_tags,
    reasoning_of,
    with_reasoning_apart,
    with_reasoning_inlined,
    without_reasoning,
)
from prompts.token_offsets import Span
from prompts.tokenizer import ChatTokenizer
from prompts.tools import tool_name
from prompts.types import Alteration, RowError, RowReason


def up_to_answer(conversation: Conversation, part: int) -> Conversation:
    """The conversation up to trained answer number `part`; all of it if none is trained."""
    answers = [index for index, turn in enumerate(conversation.turns) if turn.is_trained]
    if not answers:
        return conversation
    return replace(conversation, turns=conversation.turns[: answers[part] + 1])


class ConversationReader:
    """Renders, checks and masks one conversation."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        finder: SpanFinder,
        options: ReadingOptions,
        conversation: Conversation,
    ) -> None:
        self._tokenizer = tokenizer
        self._finder = finder
        self._options = options
        self._tools = conversation.tools
        self.alterations = set(conversation.alterations)
        if self._tools and options.tools is Tools.DROP and not tokenizer.shows_tools:
            self._tools = ()
            self.alterations.add(Alteration.TOOLS_DROPPED)
        self._turns = conversation.turns
        if options.thinking is Thinking.DROP:
            self._turns = tuple(map(without_reasoning, self._turns))
            if self._turns != conversation.turns:
                self.alterations.add(Alteration.THINKING_DROPPED)
        if tokenizer.form.takes_reasoning:
            self._turns = tuple(map(_apart, self._turns))

    def text_and_spans(self) -> tuple[str, list[Span]]:
        """The rendering, and what of it is to be trained. Raises `RowError`."""
        rendering = self._rendering(self._turns)
        answers = rendering.answers
        thoughtful = [index for index in answers if reasoning_of(rendering.turns[index])]
        trained = answers[-1:] if self._options.trains_last_only else answers
        trained = [index for index in trained if rendering.turns[index].is_trained]
        if answers and not trained:
            detail = "the row excludes every answer that would be trained"
            raise RowError(RowReason.NO_SUPERVISION, detail)
        # A template may cut any answer at a tag, even one that is not trained.
        tagged = [index for index in answers if THINK_END in answer_of(rendering.turns[index])]
        located = sorted({*trained, *thoughtful, *tagged})
        spans = dict(zip(located, self._finder.spans(rendering, located), strict=True))
        for index in set(answers) - set(located):
            if not is_shown(rendering.turns[index], rendering.text):
                detail = f"turn {index} (assistant): the template leaves out a part of it"
                raise RowError(RowReason.RENDER_FAILED, detail)
        hidden = _hidden(rendering, thoughtful, spans)
        lost = [index for index in hidden if self._must_show(index, answers)]
        if lost == answers[-1:] and (written := self._written(rendering)) is not None:
            rendering, spans[lost[0]] = written
            hidden.remove(lost[0])
        elif lost:
            rendering = self._inlined(rendering, lost)
            spans = dict(zip(located, self._finder.spans(rendering, located), strict=True))
            hidden = _hidden(rendering, thoughtful, spans)
            if lost := [index for index in hidden if self._must_show(index, answers)]:
                detail = f"turn {lost[0]} (assistant): the template leaves its reasoning out"
                raise RowError(RowReason.THINKING_LOST, detail)
        # What is hidden of an expanded row's history is hidden at inference as well.
        if hidden and self._options.thinking is not Thinking.EXPAND:
            self.alterations.add(Alteration.THINKING_HIDDEN)
        marked = [
            spans[index]
            if self._options.training.reasoning
            else without_thinking(rendering, index, spans[index])
            for index in trained
        ]
        return rendering.text, marked

    def _must_show(self, index: int, answers: Sequence[int]) -> bool:
        if self._options.thinking is Thinking.KEEP:
            return True
        return self._options.thinking is Thinking.EXPAND and index == answers[-1]

    def _rendering(self, turns: Sequence[ChatTurn]) -> Rendering:
        generation_prompt = turns[-1].role != "assistant"
        text = self._tokenizer.render(turns, generation_prompt=generation_prompt, tools=self._tools)
        rendering = Rendering(
            tokenizer=self._tokenizer,
            turns=turns,
            tools=self._tools,
            text=text,
            generation_prompt=generation_prompt,
        )
        self._check_complete(rendering)
        return rendering

    def _written(self, rendering: Rendering) -> tuple[Rendering, Span] | None:
        """The last turn as the model would have answered a generation prompt that opens a block;
        None where the prompt does not, or where that is not certain."""
        turns, tokenizer = rendering.turns, self._tokenizer
        header = tokenizer.generation_prompt
        if not header.rstrip().endswith(THINK_START) or turns[-1].tool_calls:
            return None
        if [turn.role == "assistant" for turn in turns[-2:]] != [False, True]:
            return None
        asked = self._rendering(turns[:-1]).text
        marker = self._finder.end_marker(rendering)
        answer = without_reasoning(turns[-1]).content.strip()
        text = f"{asked}{reasoning_of(turns[-1])}\n{THINK_END}\n\n{answer}{marker}"
        self.alterations.add(Alteration.THINKING_WRITTEN)
        return replace(rendering, text=text), (len(asked), len(text.rstrip()))

    def _inlined(self, rendering: Rendering, indices: Iterable[int]) -> Rendering:
        """The same with the reasoning of those turns as a block in their content."""
        turns = list(rendering.turns)
        for index in indices:
            turns[index] = with_reasoning_inlined(turns[index])
        if turns != list(rendering.turns):
            self.alterations.add(Alteration.THINKING_INLINED)
        return self._rendering(tuple(turns))

    def _check_complete(self, rendering: Rendering) -> None:
        """Raises `RowError` where the template left out something that is not an answer.

        Templates skip roles and tools that they do not know without a word. System turns may be
        moved to the front; a tool's answer may be written as a JSON string. What the assistant
        says and calls: `prompts.assistant_spans`.
        """
        text, form = rendering.text, self._tokenizer.form
        for tool in self._tools:
            if tool_name(tool) not in text:
                detail = (
                    "tool definitions are not in the rendering: the template left them out; "
                    "--tools drop leaves them out where it knows none"
                )
                raise RowError(RowReason.RENDER_FAILED, detail)
        position = 0
        for index, turn in enumerate(rendering.turns):
            if turn.role == "assistant":
                if turn.tool_calls and not form.takes_tool_calls:
                    detail = f"turn {index} (assistant): the template does not write tool calls"
                    raise RowError(RowReason.RENDER_FAILED, detail)
                for call in turn.tool_calls:
                    if call.text is not None and not form.arguments_as_text:
                        self.alterations.add(Alteration.ARGUMENTS_PARSED)
                    if call.text is None and form.arguments_as_text:
                        self.alterations.add(Alteration.ARGUMENTS_WRITTEN)
                continue
            content = turn.content.strip()
            found = text.find(content, 0 if turn.role == "system" else position)
            if found < 0 and turn.role == "tool":
                content = orjson.dumps(content).decode()[1:-1]
                found = text.find(content, position)
            if found < 0:
                detail = f"turn {index} ({turn.role}) is not in the rendering: "
                raise RowError(RowReason.RENDER_FAILED, f"{detail}the template left it out")
            if turn.role != "system":
                position = found + len(content)


def _apart(turn: ChatTurn) -> ChatTurn:
    """The turn with its reasoning in a separate field if its answer merely mentions a tag.

    Otherwise templates would cut the answer at that tag.
    """
    answer = answer_of(turn)
    if turn.role == "assistant" and THINK_END in answer and only_mentions_tags(answer):
        return with_reasoning_apart(turn)
    return turn


def _hidden(rendering: Rendering, indices: Iterable[int], spans: dict[int, Span]) -> list[int]:
    """The turns whose reasoning the rendering does not show."""
    hidden = []
    for index in indices:
        start, end = spans[index]
        # If the answer's start is known, search only before it: an answer may repeat a short
        # thought.
        position = answer_start(rendering, index, spans[index])
        shown = rendering.text[start : end if position is None else position]
        if reasoning_of(rendering.turns[index]) not in shown:
            hidden.append(index)
    return hidden

"""Reasoning of assistant turns: in a field of its own, or in a block at the start of the content.
Pure.

Only a block at the start of the content is reasoning. A later `</think>` is text, since an answer
may mention the tag. Many templates cut the answer there nevertheless, so `prompts.assistant_spans`
checks that the rendering holds the whole answer.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from prompts.conversation_parser import ChatTurn

THINK_START: Final = "<think>"
THINK_END: Final = "</think>"
Place = tuple[int, int]

_TAGS: Final = re.compile(f"{THINK_START}|{THINK_END}")
#: As most reasoning models write it, and as OpenThoughts does. The last group is the answer.
_BLOCKS: Final = (
    re.compile(r"\s*<think>(.*?)</think>\s*(.*)", re.DOTALL),
    re.compile(
        r"\s*<\|begin_of_thought\|>(.*?)<\|end_of_thought\|>"
        r"\s*<\|begin_of_solution\|>(.*)<\|end_of_solution\|>\s*",
        re.DOTALL,
    ),
)


def reasoning_of(turn: ChatTurn) -> str:
    """The turn's reasoning without the space around it; empty where it has none."""
    if turn.role != "assistant":
        return ""
    if turn.reasoning is not None:
        return turn.reasoning.strip()
    found = _split(turn.content)
    return "" if found is None else turn.content[slice(*found[0])].strip()


def answer_of(turn: ChatTurn) -> str:
    """The turn's content after its reasoning."""
    found = _split(turn.content) if turn.role == "assistant" else None
    return turn.content if found is None else turn.content[slice(*found[1])]


def without_reasoning(turn: ChatTurn) -> ChatTurn:
    """The same turn, as if the assistant had not thought."""
    if turn.role != "assistant":
        return turn
    return replace(turn, reasoning=None, content=answer_of(turn))


def with_answer(turn: ChatTurn, answer: str) -> ChatTurn:
    """The turn with another answer after the same reasoning."""
    start, end = (0, len(turn.content)) if (found := _split(turn.content)) is None else found[1]
    return replace(turn, content=turn.content[:start] + answer + turn.content[end:])


def with_reasoning_apart(turn: ChatTurn) -> ChatTurn:
    """The turn with its reasoning, possibly empty, moved to the reasoning field.

    Most templates that support the field then use the content unchanged.
    """
    return replace(turn, reasoning=reasoning_of(turn), content=answer_of(turn))


def only_mentions_tags(answer: str) -> bool:
    """Whether every `</think>` in an answer is clearly text: quoted, in code, or after a `<think>`.

    Any other may be the end of reasoning.
    """
    num_open = 0
    for tag in _TAGS.finditer(answer):
        if tag[0] == THINK_START:
            num_open += 1
        elif num_open:
            num_open -= 1
        elif not _is_quoted(answer[: tag.start()]):
            return False
    return True


def with_reasoning_inlined(turn: ChatTurn) -> ChatTurn:
    """The turn with its reasoning at the start of its content, in the form that models generate."""
    reasoning = reasoning_of(turn)
    if not reasoning or (not turn.reasoning and turn.content.lstrip().startswith(THINK_START)):
        return turn
    content = turn.content if turn.reasoning else answer_of(turn)
    block = f"{THINK_START}\n{reasoning}\n{THINK_END}\n\n"
    return replace(turn, reasoning=None, content=block + content)


def _split(content: str) -> tuple[Place, Place] | None:
    """The spans of reasoning and answer in a content that begins with reasoning; else None."""
    if THINK_END not in content and "<|end_of_thought|>" not in content:
        return None  # the common case, cheaply
    for block in _BLOCKS:
        if (found := block.fullmatch(content)) is not None:
            return found.span(1), found.span(2)
    # The generation prompt may hold the opening tag; then the closing tag is on its own line.
    head, _, tail = content.partition(THINK_END)
    before, after = head.rstrip(" \t"), tail.lstrip(" \t")
    if (
        THINK_START in head
        or _is_quoted(head)
        or (before and not before.endswith("\n"))
        or not after.startswith("\n")
        or not after.strip()
    ):
        return None
    return (0, len(head)), (len(content) - len(tail.lstrip()), len(content))


def _is_quoted(before: str) -> bool:
    """Whether the text after `before` is in code (in backticks) or directly follows a quote."""
    return before.count("`") % 2 == 1 or before.endswith(('"', "'"))

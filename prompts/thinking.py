"""Reasoning of assistant turns: in a field of its own, or in a block at the start of the content.
Pure."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from prompts.turns import Turn

THINK_START: Final = "<think>"
THINK_END: Final = "</think>"
#: As most reasoning models write it, and as OpenThoughts does. The last group is the answer.
_BLOCKS: Final = (
    re.compile(r"\s*<think>(.*?)</think>\s*(.*)", re.DOTALL),
    re.compile(
        r"\s*<\|begin_of_thought\|>(.*?)<\|end_of_thought\|>"
        r"\s*<\|begin_of_solution\|>(.*)<\|end_of_solution\|>\s*",
        re.DOTALL,
    ),
)


def reasoning_of(turn: Turn) -> str:
    """The turn's reasoning without the space around it; empty where it has none."""
    if turn.role != "assistant":
        return ""
    if turn.reasoning is not None:
        return turn.reasoning.strip()
    found = _split(turn.content)
    return "" if found is None else found[0].strip()


def without_reasoning(turn: Turn) -> Turn:
    """The same turn, as if the assistant had not thought."""
    if turn.role != "assistant":
        return turn
    found = _split(turn.content)
    content = turn.content if found is None else found[1]
    return replace(turn, reasoning=None, content=content)


def with_reasoning_inlined(turn: Turn) -> Turn:
    """The turn with its reasoning field written into its content, as reasoning models speak."""
    if turn.reasoning is None:
        return turn
    block = f"{THINK_START}\n{turn.reasoning.strip()}\n{THINK_END}\n\n"
    return replace(turn, reasoning=None, content=block + turn.content)


def _split(content: str) -> tuple[str, str] | None:
    if "<" not in content[:64]:
        return None  # the common case, cheaply
    for block in _BLOCKS:
        if (found := block.fullmatch(content)) is not None:
            return found[1], found[2]
    return None

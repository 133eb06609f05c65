"""How rows are to be read, rendered and masked, where a person may choose. Pure.

All of it decides what a prompt is, so all of it belongs to what a data set is of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

import orjson

from prompts.types import InputError

ROLE_NAMES: Final = ("system", "developer", "user", "assistant", "tool")


class Thinking(StrEnum):
    """What becomes of an assistant's reasoning, in fields of its own or in `<think>` blocks."""

    TEMPLATE = "template"  # what the chat template makes of it; what it hides is counted
    KEEP = "keep"  # all of it must be in the rendering, else the row fails
    DROP = "drop"  # taken out before rendering, and counted
    EXPAND = "expand"  # a prompt for each assistant turn, whose reasoning must be in the rendering


class Leading(StrEnum):
    """What becomes of assistant and tool turns before the first user turn."""

    REJECT = "reject"
    DROP = "drop"


class Train(StrEnum):
    """Which assistant turns the loss mask marks."""

    ALL = "all"
    LAST = "last"


class Tools(StrEnum):
    """The treatment of tool definitions that the chat template does not support."""

    KEEP = "keep"  # fail the row
    DROP = "drop"  # leave them out and count the row; a row that calls tools still fails


@dataclass(frozen=True, kw_only=True)
class Training:
    """What the loss mask marks."""

    answers: Train = Train.ALL
    reasoning: bool = True


@dataclass(frozen=True, kw_only=True)
class TemplateOptions:
    """The chat template, and the values that it gets besides the row."""

    text: str | None = None  # instead of the model's
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # JSON values, by name
    now: datetime | None = None  # with an offset; None: the time at which it is loaded


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """Raises `InputError` for values that cannot be meant."""

    #: Nothing: the dialects' order of attack. One: the column to read. Two: the user's, the
    #: assistant's.
    fields: tuple[str, ...] = ()
    role_map: Mapping[str, str] = field(default_factory=dict)  # a row's role name -> ours
    thinking: Thinking = Thinking.TEMPLATE
    leading: Leading = Leading.REJECT
    training: Training = Training()
    tools: Tools = Tools.KEEP
    #: Names to ignore: columns, and keys of turns that are about training.
    ignored_columns: tuple[str, ...] = ()
    template: TemplateOptions = field(default_factory=TemplateOptions)

    def __post_init__(self) -> None:
        if len(self.fields) > 2 or not all(self.fields):
            raise InputError("--field: name one column, or two as in question,answer")
        for name in set(self.fields) & set(self.ignored_columns):
            raise InputError(f"--field and --ignore-column both name {name}: drop one of them")
        for name, role in self.role_map.items():
            if role not in ROLE_NAMES:
                raise InputError(f"--role-map {name}={role}: the roles are {', '.join(ROLE_NAMES)}")

    @property
    def trains_last_only(self) -> bool:
        """Whether only the last assistant turn is marked: an expanded row's others have parts."""
        return self.training.answers is Train.LAST or self.thinking is Thinking.EXPAND

    def to_document(self) -> dict[str, Any]:
        """The options, JSON-ready, without the chat template and the time.

        The template's digest is kept elsewhere; only some templates read the time
        (see `Renderer.now`).
        """
        kwargs = orjson.dumps(dict(self.template.kwargs), option=orjson.OPT_SORT_KEYS)
        return {
            "fields": list(self.fields),
            "role_map": dict(sorted(self.role_map.items())),
            "thinking": self.thinking.value,
            "leading": self.leading.value,
            "train": self.training.answers.value,
            "train_thinking": self.training.reasoning,
            "tools": self.tools.value,
            "ignore_column": sorted(set(self.ignored_columns)),
            "template_kwargs": orjson.loads(kwargs),
        }


DEFAULTS: Final = ReadingOptions()

"""The options that say how rows become prompts; `run` and `show` have them in common."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import click
import orjson

from extractor.cli.option_types import GivenPath, Text
from extractor.core.bounds import MAX_COUNT
from extractor.core.errors import UsageError
from extractor.core.row_policy import OnBadRow, OnDuplicate, OnTooLong, Policy
from prompts.ambient import parse_moment
from prompts.reading_options import (
    Leading,
    ReadingOptions,
    TemplateOptions,
    Thinking,
    Tools,
    Train,
    Training,
)
from prompts.tokenizer import check_template
from prompts.types import InputError, TokenizerError

Function = TypeVar("Function", bound=Callable[..., Any])


def _values(kind: type[StrEnum]) -> list[str]:
    return [member.value for member in kind]


_READING = (
    click.option(
        "--field",
        "fields",
        type=Text(),
        default=None,
        metavar="NAME[,NAME]",
        help="Column to read, whatever else the row has; two: question and answer.  "
        "[default: the first known one]",
    ),
    click.option(
        "--role-map",
        "role_maps",
        type=Text(),
        multiple=True,
        metavar="NAME=ROLE",
        help="Take a role name that the rows have for system, developer, user, assistant or tool.",
    ),
    click.option(
        "--thinking",
        type=click.Choice(_values(Thinking)),
        default=Thinking.TEMPLATE.value,
        show_default=True,
        help="Reasoning: as the chat template shows it, all of it or the row fails, none of it, or "
        "one prompt for each answer with the reasoning of that answer.",
    ),
    click.option(
        "--leading",
        type=click.Choice(_values(Leading)),
        default=Leading.REJECT.value,
        show_default=True,
        help="Answers before the first question: fail the row, or leave them out.",
    ),
    click.option(
        "--train",
        type=click.Choice(_values(Train)),
        default=Train.ALL.value,
        show_default=True,
        help="Answers that the loss mask marks.",
    ),
    click.option(
        "--train-thinking/--no-train-thinking",
        default=True,
        show_default=True,
        help="Whether the loss mask marks reasoning.",
    ),
    click.option(
        "--tools",
        type=click.Choice(_values(Tools)),
        default=Tools.KEEP.value,
        show_default=True,
        help="If the chat template does not write tool definitions: fail the row, or drop them. "
        "A row that calls tools always fails then, since its answers are the calls.",
    ),
    click.option(
        "--ignore-column",
        "ignored_columns",
        type=Text(),
        multiple=True,
        metavar="NAME",
        help="Ignore a column, or a key about training (weight, train, ...) of turns or of objects "
        "in columns. Other keys cannot be ignored. A name that no row has is refused.",
    ),
    click.option(
        "--chat-template",
        type=GivenPath(path_type=Path),
        default=None,
        metavar="FILE",
        help="Chat template in place of the model's.",
    ),
    click.option(
        "--template-kwargs",
        type=Text(),
        default=None,
        metavar="JSON",
        help="Values for the chat template, such as '{\"enable_thinking\": false}'.",
    ),
    click.option(
        "--now",
        type=Text(),
        default=None,
        metavar="ISO8601",
        help="Time for chat templates that write the date; UTC if it has no offset.  "
        "[default: the time of the data set's first run]",
    ),
)

_POLICY = (
    click.option(
        "--on-too-long",
        type=click.Choice(_values(OnTooLong)),
        default=OnTooLong.SKIP.value,
        show_default=True,
        help="Prompts longer than the server takes or --max-tokens: fail the row, keep their "
        "beginning, or stop the run.",
    ),
    click.option(
        "--on-bad-row",
        type=click.Choice(_values(OnBadRow)),
        default=OnBadRow.SKIP.value,
        show_default=True,
        help="Rows that give no prompt: fail them, or stop the run.",
    ),
    click.option(
        "--on-duplicate",
        type=click.Choice(_values(OnDuplicate)),
        default=OnDuplicate.KEEP.value,
        show_default=True,
        help="Prompts that an earlier row gave: extract them again, or leave them out "
        "(at about 150 bytes of memory a row).",
    ),
    click.option(
        "--max-tokens",
        type=click.IntRange(1, MAX_COUNT),
        default=None,
        help="Longest prompt.  [default: what the server takes]",
    ),
    click.option(
        "--min-tokens",
        type=click.IntRange(1, MAX_COUNT),
        default=1,
        show_default=True,
        help="Shortest prompt.",
    ),
    click.option(
        "--min-trained",
        type=click.IntRange(0, MAX_COUNT),
        default=0,
        show_default=True,
        help="Minimum trained tokens of a prompt, counted after a cut; prompts with fewer fail.",
    ),
)


def reading_options(function: Function) -> Function:
    """Adds the options that `reading_from` takes."""
    for option in reversed(_READING):
        function = option(function)
    return function


def policy_options(function: Function) -> Function:
    """Adds the options that `policy_from` takes."""
    for option in reversed(_POLICY):
        function = option(function)
    return function


def reading_from(values: dict[str, Any]) -> ReadingOptions:
    """Takes its options out of `values`. Raises UsageError, InputError."""
    fields, template = values.pop("fields"), values.pop("chat_template")
    kwargs, now = values.pop("template_kwargs"), values.pop("now")
    return ReadingOptions(
        fields=tuple(fields.split(",")) if fields is not None else (),
        role_map=dict(map(_role_pair, values.pop("role_maps"))),
        thinking=Thinking(values.pop("thinking")),
        leading=Leading(values.pop("leading")),
        training=Training(
            answers=Train(values.pop("train")), reasoning=values.pop("train_thinking")
        ),
        tools=Tools(values.pop("tools")),
        ignored_columns=tuple(values.pop("ignored_columns")),
        template=TemplateOptions(
            text=None if template is None else _text_of(template),
            kwargs={} if kwargs is None else _json_object("--template-kwargs", kwargs),
            now=None if now is None else _moment(now),
        ),
    )


def policy_from(values: dict[str, Any]) -> Policy:
    """Takes its options out of `values`. Raises UsageError."""
    return Policy(
        on_too_long=OnTooLong(values.pop("on_too_long")),
        on_bad_row=OnBadRow(values.pop("on_bad_row")),
        on_duplicate=OnDuplicate(values.pop("on_duplicate")),
        max_tokens=values.pop("max_tokens"),
        min_tokens=values.pop("min_tokens"),
        min_trained=values.pop("min_trained"),
    )


def _role_pair(text: str) -> tuple[str, str]:
    name, found, role = text.rpartition("=")
    if not found or not name:
        raise UsageError(f"--role-map {text!r}: write it as NAME=ROLE")
    return name, role


def _json_object(option: str, text: str) -> dict[str, Any]:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise UsageError(f"{option}: no JSON ({error}): {text!r}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{option}: a JSON object is needed, as in '{{\"key\": 1}}'")
    return value


def _moment(text: str) -> datetime:
    try:
        return parse_moment(text)
    except InputError as error:
        raise UsageError(f"--now {error}") from error


def _text_of(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
        check_template(text)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--chat-template {path}: cannot be read ({error})") from error
    except TokenizerError as error:
        raise UsageError(f"--chat-template {path}: {error}") from error
    return text

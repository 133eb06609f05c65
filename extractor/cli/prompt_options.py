"""The options that say how rows become prompts; `run` and `show` have them in common.

Each is handed on under the name of the field of `ReadingOptions`, or of a value within it, that it
sets: `field_options.value_of` makes one of them.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import click
import orjson

from extractor.cli.option_types import TEXT, GivenPath, OneOf, Parsed, given_text
from extractor.cli.options import Function
from prompts.ambient import parse_moment
from prompts.pool import check_template
from prompts.reading_options import Leading, Thinking, Tools, Train
from prompts.regular_file import read_regular
from prompts.types import TokenizerError

#: The largest chat templates of models have some 20,000.
MAX_TEMPLATE_BYTES = 1 << 20


def _names(value: str) -> tuple[str, ...]:
    return tuple(given_text(value).split(","))


def _json_object(value: str) -> dict[str, Any]:
    text = given_text(value)
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{text!r} is not JSON ({error})") from error
    if not isinstance(document, dict):
        raise ValueError("a JSON object is needed, as in '{\"key\": 1}'")
    return document


def _moment(value: str) -> datetime:
    return parse_moment(given_text(value))


class TemplateFile(GivenPath):
    """A file with a chat template: its text."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        path: Path = super().convert(value, param, ctx)
        try:
            text = read_regular(path, max_bytes=MAX_TEMPLATE_BYTES).decode()
            check_template(text)
        except (OSError, UnicodeDecodeError) as error:
            self.fail(f"{path}: cannot be read ({error})", param, ctx)
        except TokenizerError as error:
            self.fail(f"{path}: {error}", param, ctx)
        return text


def _role(value: str) -> tuple[str, str]:
    name, _, role = given_text(value).rpartition("=")
    if not name:
        raise ValueError(f"{value!r}: write it as NAME=ROLE")
    return name, role


_OPTIONS = (
    click.option(
        "--field",
        "fields",
        type=Parsed("text", _names),
        default=None,
        metavar="NAME[,NAME]",
        help="Column to read, whatever else the row has; two: question and answer.  "
        "[default: the first known one]",
    ),
    click.option(
        "--role-map",
        type=Parsed("text", _role),
        multiple=True,
        callback=lambda _, __, pairs: dict(pairs),
        metavar="NAME=ROLE",
        help="Take a role name that the rows have for system, developer, user, assistant or tool.",
    ),
    click.option(
        "--thinking",
        type=OneOf(Thinking),
        default=Thinking.TEMPLATE.value,
        help="Reasoning: as the chat template shows it, all of it or the row fails, none of it, or "
        "one prompt for each answer with the reasoning of that answer.",
    ),
    click.option(
        "--leading",
        type=OneOf(Leading),
        default=Leading.REJECT.value,
        help="Answers before the first question: fail the row, or leave them out.",
    ),
    click.option(
        "--train",
        "answers",
        type=OneOf(Train),
        default=Train.ALL.value,
        help="Answers that the loss mask marks.",
    ),
    click.option(
        "--train-thinking/--no-train-thinking",
        "reasoning",
        default=True,
        help="Whether the loss mask marks reasoning.",
    ),
    click.option(
        "--tools",
        type=OneOf(Tools),
        default=Tools.KEEP.value,
        help="If the chat template does not write tool definitions: fail the row, or drop them. "
        "A row that calls tools always fails then, since its answers are the calls.",
    ),
    click.option(
        "--ignore-column",
        "ignored_columns",
        type=TEXT,
        multiple=True,
        metavar="NAME",
        help="Ignore a column, or a key about training (weight, train, ...) of turns or of objects "
        "in columns. Other keys cannot be ignored. A name that no row has is refused.",
    ),
    click.option(
        "--chat-template",
        "text",
        type=TemplateFile(path_type=Path),
        default=None,
        metavar="FILE",
        help="Chat template in place of the model's.",
    ),
    click.option(
        "--template-kwargs",
        "kwargs",
        type=Parsed("text", _json_object),
        default=None,
        metavar="JSON",
        help="Values for the chat template, such as '{\"enable_thinking\": false}'.",
    ),
    click.option(
        "--now",
        type=Parsed("text", _moment),
        default=None,
        metavar="ISO8601",
        help="Time for chat templates that write the date; UTC if it has no offset.  "
        "[default: the time of the data set's first run]",
    ),
)


def reading_options(function: Function) -> Function:
    """Add the options of `ReadingOptions`."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function

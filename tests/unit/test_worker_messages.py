"""What the client and its worker processes send each other."""

from __future__ import annotations

import os
import pickle

import pytest

from prompts.ambient import parse_moment
from prompts.reading_options import (
    DEFAULTS,
    Leading,
    ReadingOptions,
    TemplateOptions,
    Thinking,
    Tools,
    Train,
    Training,
)
from prompts.token_bound import TokenBound
from prompts.worker_messages import (
    CodeLimits,
    dumps,
    load_message,
    loaded_bound,
    loaded_limits,
    loaded_options,
    loads,
)

EVERYTHING = ReadingOptions(
    fields=("question", "answer"),
    role_map={"narrator": "user", "bot": "assistant"},
    thinking=Thinking.EXPAND,
    leading=Leading.DROP,
    training=Training(answers=Train.LAST, reasoning=False),
    tools=Tools.DROP,
    ignored_columns=("b", "a"),
    template=TemplateOptions(
        text="{{ x }}", kwargs={"b": 1, "a": [None]}, now=parse_moment("1999-12-31T23:59:58+05:30")
    ),
)


@pytest.mark.parametrize("options", [DEFAULTS, EVERYTHING], ids=["defaults", "everything"])
def test_a_worker_gets_all_options(options: ReadingOptions) -> None:
    bound = TokenBound(max_tokens=5, keeps_beginning=True, max_whole_chars=7)
    limits = CodeLimits(row_s=1.5, load_s=2, memory_bytes=3, max_deaths=4)
    kind, source, *values = loads(dumps(load_message("folder", options, bound, limits)))
    assert (kind, source) == ("load", "folder")
    assert loaded_options(values[0]) == options
    assert list(loaded_options(values[0]).template.kwargs) == list(options.template.kwargs)
    assert loaded_bound(values[1]) == bound
    assert loaded_limits(values[2]) == limits


def test_no_option_is_missing_from_the_test() -> None:
    for name in ReadingOptions.__dataclass_fields__:
        assert getattr(EVERYTHING, name) != getattr(DEFAULTS, name), name


@pytest.mark.parametrize("value", [os.system, DEFAULTS, KeyError("x")])
def test_a_message_that_names_something_to_import_is_refused(value: object) -> None:
    with pytest.raises(pickle.UnpicklingError, match="not a plain value"):
        loads(pickle.dumps(("rows", value)))

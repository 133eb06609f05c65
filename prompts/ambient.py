"""Inputs of a chat template besides its row: the time, which is frozen, and random values. Pure.

A prompt must be the same in every process and every session of a data set, so nothing here depends
on the clock, the time zone or the random seed of the process.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from prompts.types import InputError

#: The clock function that transformers passes to templates, by default `datetime.now().strftime`.
CLOCK: Final = "strftime_now"
_MAP: Final = [("name", "map"), ("operator", "(")]
_DIRECTIVES: Final = re.compile("%(.)", re.DOTALL)


def current_moment() -> datetime:
    """The current local time with its UTC offset, to the second."""
    return datetime.now().astimezone().replace(microsecond=0)


def parse_moment(text: str) -> datetime:
    """Parse an ISO 8601 date or time; without an offset it is UTC. Raises `InputError`."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as exc:
        raise InputError(
            f"{text!r} is not an ISO 8601 time: write it as 2026-01-31 or 2026-01-31T12:00:00+01:00"
        ) from exc
    moment = moment.replace(microsecond=0)
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def reads_clock(template: str) -> bool:
    """Whether the chat template may ask for the time."""
    return CLOCK in template


def clock_at(moment: datetime) -> Callable[[str], str]:
    """A `strftime_now` that always formats `moment`."""
    # Drop the offset, since transformers passes naive local time to templates.
    bare = moment.replace(tzinfo=None)

    def strftime(format: str) -> str:
        # %s is the only directive that depends on the time zone of the process.
        seconds = str(int(moment.timestamp()))
        return bare.strftime(
            _DIRECTIVES.sub(lambda found: seconds if found[1] == "s" else found[0], format)
        )

    return strftime


def draws_at_random(template: str) -> bool:
    """Whether the chat template uses Jinja's random features: `lipsum` and the filter `random`.

    Raises what jinja2 raises for an invalid template.
    """
    from jinja2 import Environment

    before = [("", ""), ("", "")]
    for _, kind, value in Environment().lex(template):
        if kind == "whitespace":
            continue
        match kind, value:
            case "name", "lipsum" if before[-1] != ("operator", "."):
                return True
            case "name", "random" if before[-1] in (("operator", "|"), ("name", "filter")):
                return True
            case "string", "'random'" | '"random"' if before == _MAP:
                return True
        before = [before[-1], (kind, value)]
    return False

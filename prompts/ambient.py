"""What a chat template can ask for besides its row: the time, which is frozen, and chance. Pure.

A prompt must come out the same in every process and every session of a data set, so nothing here
depends on the process: not on its clock, its time zone or its seed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from prompts.types import InputError

#: The function that transformers gives to templates; `datetime.now().strftime` there.
CLOCK: Final = "strftime_now"
_MAP: Final = [("name", "map"), ("operator", "(")]
_DIRECTIVES: Final = re.compile("%(.)", re.DOTALL)


def current_moment() -> datetime:
    """The time to the second, as the local time zone has it, with that zone's offset."""
    return datetime.now().astimezone().replace(microsecond=0)


def parse_moment(text: str) -> datetime:
    """An ISO 8601 date or time; without an offset it is UTC. Raises `InputError`."""
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
    """`strftime_now` of a clock that stands still."""
    # Without its offset, since templates get the bare local time from transformers.
    bare = moment.replace(tzinfo=None)

    def strftime(format: str) -> str:
        # %s is the one directive that would go through this process's time zone.
        seconds = str(int(moment.timestamp()))
        return bare.strftime(
            _DIRECTIVES.sub(lambda found: seconds if found[1] == "s" else found[0], format)
        )

    return strftime


def draws_at_random(template: str) -> bool:
    """Whether the chat template uses what Jinja has of chance: `lipsum`, and the filter `random`.

    Raises what jinja2 raises for a template that cannot be read.
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
            case "string", "'random'" | '"random"' if before == [
                ("name", "map"),
                ("operator", "("),
            ]:
                return True
        before = [before[-1], (kind, value)]
    return False

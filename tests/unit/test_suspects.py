"""Which prompts may have killed a server."""

from __future__ import annotations

from helpers import make_prompts, prompt_of

from extractor.core.failure import FailureKind
from extractor.dispatch.suspects import InFlightPrompt, Suspects
from manifest.states import Reason


def in_flight(*ordinals: int) -> list[InFlightPrompt]:
    (row,) = make_prompts(1)
    return [
        InFlightPrompt(prompt=prompt_of(row), ordinal=ordinal, attempts=1) for ordinal in ordinals
    ]


def test_of_many_prompts_none_is_convicted_and_all_are_suspects() -> None:
    suspects = Suspects({})
    assert suspects.judge(in_flight(3, 4)) is None
    assert [suspects.is_suspect(ordinal) for ordinal in (3, 4, 5)] == [True, True, False]
    assert not suspects.is_convicted(3)


def test_a_prompt_alone_with_its_first_dead_server_is_no_more_than_a_suspect() -> None:
    suspects = Suspects({})
    assert suspects.judge(in_flight(3)) is None
    assert suspects.is_suspect(3)


def test_a_suspect_alone_with_a_second_dead_server_is_convicted() -> None:
    suspects = Suspects({3: 1})  # as an earlier session recorded it
    (found,) = in_flight(3)
    assert suspects.judge([found]) is found
    assert suspects.is_convicted(3)
    sentence = suspects.sentence(3)
    assert (sentence.reason, sentence.kind) == (Reason.KILLS_SERVER, FailureKind.PERMANENT)
    assert "2 times" in sentence.detail


def test_a_suspect_that_is_served_is_none_any_more() -> None:
    suspects = Suspects({3: 1})
    suspects.clear(3)
    assert not suspects.is_suspect(3)
    assert suspects.judge(in_flight(3)) is None

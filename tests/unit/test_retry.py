"""What happens after a failed attempt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extractor.core.failure import Failure, FailureKind
from extractor.dispatch.retry import RetryPolicy, Setbacks
from manifest.states import Reason

POLICY = RetryPolicy(max_attempts=3)


def failure(kind: FailureKind) -> Failure:
    return Failure(reason=Reason.SERVER_ERROR, detail="", kind=kind)


def setbacks_of(kind: FailureKind, number: int, *, others_served: bool = False) -> Setbacks:
    setbacks = Setbacks()
    for _ in range(number):
        setbacks.add(failure(kind), others_served=others_served)
    return setbacks


def gives_up(kind: FailureKind, number: int, *, others_served: bool = False) -> bool:
    """Whether a prompt fails after that many failures of one kind."""
    setbacks = setbacks_of(kind, number, others_served=others_served)
    return POLICY.gives_up(failure(kind), setbacks)


@pytest.mark.parametrize("kind", [FailureKind.SAMPLE, FailureKind.SERVER, FailureKind.SILENT])
def test_a_row_has_so_many_attempts_and_no_more(kind: FailureKind) -> None:
    assert [gives_up(kind, number) for number in (1, 2, 3, 4)] == [False, False, True, True]


def test_what_trying_cannot_change_is_given_up_at_once() -> None:
    assert gives_up(FailureKind.PERMANENT, 1)


@pytest.mark.parametrize(
    "kind", [kind for kind in FailureKind if not kind.counts and kind is not FailureKind.FULL]
)
def test_trouble_of_the_server_costs_no_attempt_but_not_for_ever(kind: FailureKind) -> None:
    assert not gives_up(kind, 10_000)  # nobody else was served either
    assert not gives_up(kind, 63, others_served=True)
    assert gives_up(kind, 64, others_served=True)


def test_a_dump_root_that_somebody_else_fills_fails_no_row() -> None:
    assert not gives_up(FailureKind.FULL, 10_000, others_served=True)


@given(st.integers(1, 10**6), st.floats(0, 1))
def test_delays_grow_up_to_the_cap_and_are_never_negative(setback: int, chance: float) -> None:
    delay = POLICY.delay_s(setback, chance=chance)
    assert 0 <= delay <= POLICY.max_delay_s
    assert delay <= POLICY.delay_s(setback + 1, chance=chance)
    assert POLICY.delay_s(setback, chance=0.0) == 0

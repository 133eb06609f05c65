"""What happens after a failed attempt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extractor.core.failure import Failure
from extractor.dispatch.retry import Remedy, RetryPolicy
from manifest.states import Reason

POLICY = RetryPolicy(max_attempts=3)


def failure(**kind: bool) -> Failure:
    return Failure(reason=Reason.SERVER_ERROR, detail="", **kind)


def test_a_row_has_so_many_attempts_and_no_more() -> None:
    found = [POLICY.remedy(failure(), num_counted=n, num_setbacks=n) for n in (1, 2, 3, 4)]
    assert found == [Remedy.RETRY, Remedy.RETRY, Remedy.GIVE_UP, Remedy.GIVE_UP]


def test_what_trying_cannot_change_is_given_up_at_once() -> None:
    assert (
        POLICY.remedy(failure(is_permanent=True), num_counted=1, num_setbacks=1) is Remedy.GIVE_UP
    )


@pytest.mark.parametrize("kind", ["is_busy", "is_transport"])
def test_trouble_of_the_server_costs_no_attempt_but_not_for_ever(kind: str) -> None:
    trouble = failure(**{kind: True})
    assert trouble.is_not_counted
    assert POLICY.remedy(trouble, num_counted=10**6, num_setbacks=63) is Remedy.RETRY
    assert POLICY.remedy(trouble, num_counted=0, num_setbacks=64) is Remedy.GIVE_UP


@given(st.integers(1, 10**6), st.floats(0, 1))
def test_delays_grow_up_to_the_cap_and_are_never_negative(setback: int, chance: float) -> None:
    delay = POLICY.delay_s(setback, chance=chance)
    assert 0 <= delay <= POLICY.max_delay_s
    assert delay <= POLICY.delay_s(setback + 1, chance=chance)
    assert POLICY.delay_s(setback, chance=0.0) == 0

"""How many requests a server has at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extractor.dispatch.limiter import Limiter, default_limit

events = st.lists(
    st.tuples(st.sampled_from(["served", "refused", "restart"]), st.floats(0, 10)), max_size=400
)


@given(st.integers(1, 600), events)
def test_something_may_always_be_in_flight_and_never_more_than_the_bound(
    bound: int, happened: list[tuple[str, float]]
) -> None:
    limiter, now = Limiter(bound), 0.0
    for kind, pause_s in happened:
        now += pause_s
        match kind:
            case "served":
                limiter.served()
            case "refused":
                limiter.refused(now=now, sent_at=now - pause_s)
            case _:
                limiter.restart(now=now)
                assert limiter.limit == 1
        assert 1 <= limiter.limit <= bound


@given(st.integers(2, 512))
def test_the_bound_comes_back_when_everything_is_served(bound: int) -> None:
    limiter = Limiter(bound)
    limiter.restart(now=1.0)
    num_served = 0
    while limiter.limit < bound:
        limiter.served()
        num_served += 1
    assert num_served <= 10 * bound + 64


def test_a_burst_of_refusals_is_one_cut() -> None:
    limiter = Limiter(64)
    for number in range(64):
        limiter.refused(now=1.0 + number / 1000, sent_at=0.5)
    assert limiter.limit == 32


@pytest.mark.parametrize(
    ("server_takes", "connections", "expected"),
    [
        (96, 1000, 96), (4096, 1000, 512), (None, 1000, 512), (None, 100, 100), (1, 1000, 1),
        (96, 40, 40), (0, 1000, 1),
    ],
)  # fmt: skip
def test_the_default_is_what_the_server_takes_within_what_this_process_may_open(
    server_takes: int | None, connections: int, expected: int
) -> None:
    assert default_limit(server_takes, connections=connections) == expected

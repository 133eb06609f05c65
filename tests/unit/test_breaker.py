"""The circuit breaker and its throttle, whatever the server does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extractor.breaker import Breaker

outcomes = st.lists(
    st.tuples(st.sampled_from(["served", "refused", "unserved", "gone"]), st.floats(0, 100)),
    max_size=200,
)


def play(breaker: Breaker, events: list[tuple[str, float]]) -> float:
    now = 0.0
    for kind, pause_s in events:
        now += pause_s
        match kind:
            case "served":
                breaker.served(now=now)
            case "refused":
                breaker.refused(now=now, sent_at=now - pause_s)
            case _:
                breaker.unserved(now=now, is_gone=kind == "gone")
    return now


@given(st.integers(1, 512), outcomes)
def test_something_may_always_be_in_flight_and_never_more_than_asked_for(
    most: int, events: list[tuple[str, float]]
) -> None:
    breaker = Breaker(max_requests=most)
    play(breaker, events)
    assert 1 <= breaker.limit <= most


@given(outcomes)
def test_one_served_request_makes_up_for_everything(events: list[tuple[str, float]]) -> None:
    breaker = Breaker(max_requests=64)
    now = play(breaker, events)
    breaker.served(now=now)
    assert not breaker.is_open
    assert not breaker.is_hopeless(now=now + 10**9)
    assert breaker.trouble_s(now=now + 1) == 0


@given(outcomes)
def test_refusals_open_the_circuit_when_nothing_is_served_for_long(
    events: list[tuple[str, float]],
) -> None:
    breaker = Breaker(max_requests=64)
    now = play(breaker, [("refused", pause_s) for _, pause_s in events])
    assert breaker.is_open is (breaker.trouble_s(now=now) > breaker.refused_open_s)


@given(st.integers(2, 512))
def test_the_width_comes_back_when_all_is_served(most: int) -> None:
    breaker = Breaker(max_requests=most)
    breaker.refused(now=1.0, sent_at=0.5)
    assert breaker.limit == most // 2
    for _ in range(most * most):
        breaker.served(now=2.0)
    assert breaker.limit == most


def test_a_burst_of_refusals_is_one_cut() -> None:
    breaker = Breaker(max_requests=64)
    for number in range(64):
        breaker.refused(now=1.0 + number / 1000, sent_at=0.5)
    assert breaker.limit == 32

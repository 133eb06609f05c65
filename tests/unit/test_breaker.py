"""The circuit breaker, whatever the server does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extractor.dispatch.breaker import Breaker

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
                breaker.served()
            case "refused":
                breaker.refused(now=now)
            case _:
                breaker.unserved(now=now, is_gone=kind == "gone")
    return now


@given(outcomes)
def test_one_served_request_makes_up_for_everything(events: list[tuple[str, float]]) -> None:
    breaker = Breaker()
    now = play(breaker, events)
    breaker.served()
    assert not breaker.is_open
    assert not breaker.is_hopeless(now=now + 10**9)
    assert breaker.trouble_s(now=now + 1) == 0


@given(outcomes)
def test_refusals_open_the_circuit_when_nothing_is_served_for_long(
    events: list[tuple[str, float]],
) -> None:
    breaker = Breaker()
    now = play(breaker, [("refused", pause_s) for _, pause_s in events])
    assert breaker.is_open is (breaker.trouble_s(now=now) > breaker.refused_open_s)

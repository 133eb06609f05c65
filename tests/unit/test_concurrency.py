"""How many requests a server gets, over simulated servers: noisy, with every kind of knee."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extractor.dispatch.limiter import FIRST_LIMIT, Auto, Fixed, Limiter

Length = Callable[[random.Random], int]


@dataclass(kw_only=True)
class Simulated:
    """A server that prefills batches of at most `chunk` tokens; time is made up.

    A batch takes `overhead_s` and its tokens at `tokens_per_s`, times noise. More than `capacity`
    requests at a time are refused.
    """

    tokens_per_s: float
    overhead_s: float = 0.02
    chunk: int = 8192
    noise: float = 0.05
    capacity: float = math.inf
    length: Length = lambda chance: 2048
    now: float = 0.0
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    def serve(self, limiter: Limiter, count: int, *, most: int | None = None) -> float:
        """Serve `count` prompts; tokens/s. `most`: requests that the client has at all."""
        waiting: deque[int] = deque()
        in_flight = sent = done = tokens = 0
        began = self.now
        while done < count:
            sent_at = self.now
            while in_flight < min(limiter.limit, most or math.inf) and sent < count:
                if in_flight >= self.capacity:
                    limiter.refused(now=self.now + 0.001, sent_at=sent_at)
                    break
                waiting.append(self.length(self.chance))
                in_flight, sent = in_flight + 1, sent + 1
            batch = [waiting.popleft()]
            while waiting and sum(batch) + waiting[0] <= self.chunk:
                batch.append(waiting.popleft())
            spent = self.overhead_s + sum(batch) / self.tokens_per_s
            self.now += spent * math.exp(self.chance.gauss(0, self.noise)) + 0.002
            for num_tokens in batch:
                self.now += 1e-6
                limiter.served(now=self.now, num_tokens=num_tokens, in_flight=in_flight)
                in_flight -= 1
                done, tokens = done + 1, tokens + num_tokens
        return tokens / (self.now - began)


def mixed(chance: random.Random) -> int:
    return int(min(8000, chance.lognormvariate(6.5, 1))) + 1


SHAPES = {
    "2,048 tokens on a GPU": {"tokens_per_s": 40_000},
    "64 tokens on a GPU": {"tokens_per_s": 200_000, "length": lambda chance: 64},
    "mixed lengths": {"tokens_per_s": 40_000, "length": mixed},
    "longer than a chunk": {"tokens_per_s": 40_000, "length": lambda chance: 9000},
    "very noisy": {"tokens_per_s": 40_000, "noise": 0.25},
    "256 tokens on a CPU": {
        "tokens_per_s": 2000, "overhead_s": 0.01, "chunk": 2048, "noise": 0.15,
        "length": lambda chance: 256,
    },
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_auto_is_about_as_fast_as_the_best_number(shape: dict[str, object]) -> None:
    count = 12_000
    fixed = {
        number: Simulated(**shape).serve(Fixed(number), count)  # type: ignore[arg-type]
        for number in (1, 4, 16, 64, 256)
    }
    ratios = []
    for seed in range(5):
        limiter = Auto(most=512)
        server = Simulated(**shape, chance=random.Random(seed))  # type: ignore[arg-type]
        server.serve(limiter, count)  # it climbs
        ratios.append(server.serve(limiter, count) / max(fixed.values()))
    assert min(ratios) > 0.9
    assert median(ratios) > 0.95


def test_it_does_not_run_away_where_more_gives_nothing() -> None:
    """The knee of this server is at 4 to 8 requests: two batches of 8,192 tokens."""
    reached = []
    for seed in range(10):
        limiter = Auto(most=512)
        server = Simulated(tokens_per_s=40_000, noise=0.1, chance=random.Random(seed))
        limits = []
        for _ in range(100):
            server.serve(limiter, 200)
            limits.append(limiter.limit)
        reached.append(median(limits))
    assert median(reached) <= 16
    assert max(reached) <= 32


def test_it_climbs_to_where_the_batches_are_full() -> None:
    """128 prompts of 64 tokens fill one batch of 8,192."""
    limiter = Auto(most=512)
    server = Simulated(tokens_per_s=200_000, length=lambda chance: 64)
    server.serve(limiter, 20_000)
    assert limiter.limit >= 96


def test_it_keeps_within_what_the_server_takes() -> None:
    limiter = Auto(most=20)
    limits = set()
    server = Simulated(tokens_per_s=200_000, length=lambda chance: 64)
    for _ in range(300):
        server.serve(limiter, 40)
        limits.add(limiter.limit)
    assert max(limits) == 20


def test_it_backs_off_from_refusals_and_stays_near_what_is_served() -> None:
    limiter = Auto(most=512)
    server = Simulated(tokens_per_s=200_000, length=lambda chance: 64, capacity=24)
    limits = []
    for _ in range(300):
        server.serve(limiter, 100)
        limits.append(limiter.limit)
    assert 12 <= median(limits) <= 24


def test_it_climbs_again_when_refusals_end() -> None:
    limiter = Auto(most=512)
    server = Simulated(tokens_per_s=200_000, length=lambda chance: 64, capacity=8)
    server.serve(limiter, 10_000)
    assert limiter.limit <= 12
    server.capacity = math.inf
    server.serve(limiter, 60_000)
    assert limiter.limit >= 96


def test_it_climbs_again_after_a_restart() -> None:
    limiter = Auto(most=512)
    server = Simulated(tokens_per_s=200_000, length=lambda chance: 64)
    server.serve(limiter, 10_000)
    limiter.restart(now=server.now)
    assert limiter.limit == 1
    server.serve(limiter, 20_000)
    assert limiter.limit >= 96


def test_it_follows_a_knee_that_moves() -> None:
    limiter = Auto(most=512)
    server = Simulated(tokens_per_s=200_000)
    server.serve(limiter, 5000)
    assert limiter.limit <= 24
    server.length = lambda chance: 64
    server.serve(limiter, 60_000)
    assert limiter.limit >= 64


def test_a_limit_that_is_never_reached_is_left_where_it_is() -> None:
    """The byte budget or the disk is in the way, which more requests would not mend."""
    limiter = Auto(most=512)
    Simulated(tokens_per_s=40_000).serve(limiter, 5000, most=3)
    assert limiter.limit == FIRST_LIMIT


events = st.lists(
    st.tuples(
        st.sampled_from(["served", "refused", "restart"]),
        st.floats(0, 10),
        st.integers(1, 10_000),
    ),
    max_size=400,
)


@given(st.integers(1, 600), st.booleans(), events)
def test_something_may_always_be_in_flight_and_never_more_than_the_most(
    most: int, is_fixed: bool, happened: list[tuple[str, float, int]]
) -> None:
    limiter: Limiter = Fixed(most) if is_fixed else Auto(most=most)
    now = 0.0
    for kind, pause_s, num_tokens in happened:
        now += pause_s
        match kind:
            case "served":
                limiter.served(now=now, num_tokens=num_tokens, in_flight=limiter.limit)
            case "refused":
                limiter.refused(now=now, sent_at=now - pause_s)
            case _:
                limiter.restart(now=now)
                assert limiter.limit == 1
        assert 1 <= limiter.limit <= most
        assert limiter.room >= limiter.limit


@given(st.integers(2, 512))
def test_a_fixed_number_comes_back_when_all_is_served(most: int) -> None:
    limiter = Fixed(most)
    limiter.refused(now=1.0, sent_at=0.5)
    assert limiter.limit == most // 2
    for _ in range(most * most):
        limiter.served(now=2.0, num_tokens=1, in_flight=1)
    assert limiter.limit == most


@pytest.mark.parametrize("limiter", [Fixed(64), Auto(most=64)], ids=["fixed", "auto"])
def test_a_burst_of_refusals_is_one_cut(limiter: Limiter) -> None:
    before = limiter.limit
    for number in range(64):
        limiter.refused(now=1.0 + number / 1000, sent_at=0.5)
    assert limiter.limit == before // 2

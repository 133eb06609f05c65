"""Histograms that do not grow, speeds of late, and one document for everybody."""

from __future__ import annotations

import random
import threading
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extractor.core.counters import Counters, InputRows, Moment, Pace, ServerNow, Stage
from extractor.core.histogram import BOUNDS_S, SHOWN_BOUNDS_S, Durations
from extractor.status.report import session_document
from manifest.states import Reason


def test_bounds_grow_by_an_eighth_and_hold_1_2_5_of_each_decade() -> None:
    assert all(1.1 < later / earlier < 1.15 for earlier, later in pairwise(BOUNDS_S))
    assert SHOWN_BOUNDS_S[:4] == (1e-5, 2e-5, 5e-5, 1e-4)
    assert SHOWN_BOUNDS_S[-3:] == (200.0, 500.0, 1000.0)
    assert len(SHOWN_BOUNDS_S) == 25
    assert set(SHOWN_BOUNDS_S) <= set(BOUNDS_S)


@given(st.lists(st.floats(0, 5000), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_a_quantile_is_the_true_one_or_an_eighth_more(values: list[float], share: float) -> None:
    durations = Durations()
    for value in values:
        durations.add(value)
    rank = next(n for n in range(1, len(values) + 1) if n >= share * len(values))
    true = sorted(values)[rank - 1]
    found = durations.quantile(share)
    assert true <= found
    assert found <= max(true * 1.15, BOUNDS_S[0]) or true > BOUNDS_S[-1]
    assert found <= durations.max_s == max(values)


def test_nothing_counted_is_zero_and_a_clock_set_back_too() -> None:
    durations = Durations()
    assert (durations.quantile(0.5), durations.mean_s, durations.count) == (0.0, 0.0, 0)
    durations.add(-3.0)
    assert (durations.quantile(0.5), durations.max_s, durations.count) == (0.0, 0.0, 1)


def test_shown_buckets_are_cumulative_and_end_with_all() -> None:
    durations = Durations()
    for value in (0.000001, 0.001, 0.0011, 0.5, 5000.0):
        durations.add(value)
    buckets = dict(durations.buckets())
    assert buckets[1e-5] == 1
    assert buckets[0.001] == 2  # a bound belongs to its bucket
    assert buckets[0.002] == 3
    assert buckets[1000.0] == 4
    assert buckets[float("inf")] == 5
    assert durations.total_s == pytest.approx(5000.502101)


def test_threads_lose_nothing_of_each_other() -> None:
    durations = Durations()

    def add_many() -> None:
        for _ in range(20_000):
            durations.add(0.001)

    threads = [threading.Thread(target=add_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert durations.count == 80_000


def test_memory_does_not_grow_with_what_is_counted() -> None:
    durations, pace = Durations(), Pace(window_s=10.0)
    chance = random.Random(0)
    for moment in range(10_000):
        durations.add(chance.expovariate(100.0))
        pace.note(moment / 2, tokens=moment, rows=moment)
    assert len(durations._counts) == len(BOUNDS_S) + 1
    assert len(pace._noted) == 21


def test_speed_of_late_forgets_what_was_before() -> None:
    pace = Pace(window_s=10.0)
    assert pace.tokens_per_s == 0.0
    pace.note(0.0, tokens=0, rows=0)
    assert pace.tokens_per_s == 0.0
    pace.note(5.0, tokens=5000, rows=50)
    assert (pace.tokens_per_s, pace.rows_per_s) == (1000.0, 10.0)
    for moment in range(6, 30):
        pace.note(float(moment), tokens=5000, rows=50)
    assert (pace.tokens_per_s, pace.rows_per_s) == (0.0, 0.0)


def test_failed_rows_are_the_sum_of_their_reasons() -> None:
    counters = Counters(rows=InputRows(total=10, settled_before=2, stored=3))
    counters.rows.failed_by_reason[Reason.BAD_JSON] += 1
    counters.rows.failed_by_reason[Reason.TOO_LONG] += 2
    assert (counters.rows.failed, counters.rows.settled) == (3, 8)
    document = session_document(counters)
    assert document["failed_by_reason"] == {"bad_json": 1, "too_long": 2}


def test_the_document_says_how_things_stand() -> None:
    counters = Counters()
    counters.observe(
        Moment(
            servers=(
                ServerNow(url="a", is_up=True, in_flight=3, request_limit=8, num_prompts=6),
                ServerNow(url="b", is_up=False, in_flight=0, request_limit=0, num_prompts=4),
            ),
            shm_bytes=100,
            peak_shm_bytes=300,
            budget_bytes=1000,
            budget_queue=2,
            mover_queue=5,
        )
    )
    counters.stages[Stage.RESIDENCY].add(0.02)
    document = session_document(counters)
    assert document["now"]["in_flight"] == 3
    assert document["now"]["request_limit"] == 8
    assert document["now"]["servers"][1] == {
        "url": "b", "is_up": False, "in_flight": 0, "request_limit": 0, "prompts": 4,
    }  # fmt: skip
    assert document["now"]["budget_bytes"] == 1000
    assert document["stages"]["residency"]["p99_ms"] == 20.0
    assert set(document["stages"]) == {stage.value for stage in Stage}

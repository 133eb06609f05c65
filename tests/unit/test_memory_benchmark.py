"""A leak is told from what an allocator keeps once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.memory import ALLOWED, Reading, leak

#: Of a tiny model: 100 prompts of 64 tokens.
DUMPED = 8_300_000


def taken(schedulers: Sequence[int]) -> list[Reading]:
    return [
        Reading(
            requests=100 * (index + 1),
            dump_bytes=DUMPED * (index + 1),
            schedulers=held,
            writers=8_000_000,
            gpu=None,
        )
        for index, held in enumerate(schedulers)
    ]


def test_memory_that_stays_is_no_leak() -> None:
    assert leak(taken([587_000_000] * 10), "schedulers") == 0


@pytest.mark.parametrize("steps", [(3, 7), (1, 2, 5, 9)])
def test_steps_of_an_allocator_are_no_leak(steps: Sequence[int]) -> None:
    held = [587_000_000 + 4_000_000 * sum(at >= step for step in steps) for at in range(10)]
    assert leak(taken(held), "schedulers") <= 0


@pytest.mark.parametrize("share", [0.011, 0.05, 1.0])
def test_what_each_dump_leaves_behind_is_a_leak(share: float) -> None:
    held = [587_000_000 + int(share * DUMPED * at) for at in range(10)]
    assert leak(taken(held), "schedulers") == pytest.approx(share, rel=1e-3)
    assert leak(taken(held), "schedulers") > ALLOWED
    assert leak(taken(held), "writers") == 0

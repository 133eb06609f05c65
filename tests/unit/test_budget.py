"""The byte budget: never exceeded, first come first served, and nothing leaks."""

from __future__ import annotations

import asyncio
import random

import pytest

from extractor.dispatch.budget import Budget


def budget_of(total: int, *, max_holders: int = 1000) -> Budget:
    return Budget(total, max_holders=max_holders)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Holder:
    """A task that holds some bytes until it is told to let go."""

    def __init__(self, budget: Budget, size_bytes: int) -> None:
        self.has_it = False
        self.let_go = asyncio.Event()
        self.task = asyncio.create_task(self._hold(budget, size_bytes))

    async def _hold(self, budget: Budget, size_bytes: int) -> None:
        await budget.take(size_bytes)
        try:
            self.has_it = True
            await self.let_go.wait()
        finally:
            budget.give_back(size_bytes)
        self.has_it = False


async def test_what_fits_is_granted_at_once_and_what_does_not_waits() -> None:
    budget = budget_of(10)
    first, second, third = (Holder(budget, size) for size in (6, 4, 1))
    await settle()
    assert (first.has_it, second.has_it, third.has_it) == (True, True, False)
    second.let_go.set()
    await settle()
    assert third.has_it
    assert (budget.used, budget.peak) == (7, 10)
    first.let_go.set()
    third.let_go.set()
    await settle()
    assert budget.used == 0


async def test_small_ones_do_not_overtake_a_large_one() -> None:
    budget = budget_of(10)
    holding = Holder(budget, 5)
    await settle()
    large = Holder(budget, 8)
    await settle()
    small = Holder(budget, 1)  # would fit now
    await settle()
    assert (large.has_it, small.has_it) == (False, False)
    holding.let_go.set()
    await settle()
    assert (large.has_it, small.has_it) == (True, True)
    large.let_go.set()
    small.let_go.set()
    await settle()


async def test_more_than_the_whole_is_a_mistake() -> None:
    budget = budget_of(10)
    with pytest.raises(ValueError, match="can never fit"):
        await budget.take(11)
    await budget.take(10)
    assert budget.used == 10


async def test_prompts_are_bounded_by_number_too() -> None:
    budget = budget_of(10, max_holders=2)
    first, second, third = (Holder(budget, 1) for _ in range(3))
    await settle()
    assert (first.has_it, second.has_it, third.has_it) == (True, True, False)
    first.let_go.set()
    await settle()
    assert third.has_it
    for holder in (second, third):
        holder.let_go.set()
    await settle()
    assert (budget.used, budget.num_holders) == (0, 0)


async def test_lent_bytes_are_others_until_they_are_given_back() -> None:
    budget = budget_of(10, max_holders=2)
    await budget.take(10)
    other = Holder(budget, 10)
    async with budget.lent(10):
        await settle()
        assert other.has_it
        assert budget.num_holders == 2
        other.let_go.set()
    assert (budget.used, budget.num_holders) == (10, 1)
    budget.give_back(10)
    assert (budget.used, budget.num_holders) == (0, 0)


async def test_lent_bytes_are_held_again_where_the_block_is_cancelled() -> None:
    budget = budget_of(10)

    async def hold() -> None:
        await budget.take(10)
        try:
            async with budget.lent(10):
                await asyncio.Event().wait()
        finally:
            budget.give_back(10)

    task = asyncio.create_task(hold())
    await settle()
    assert budget.used == 0
    task.cancel()
    await settle()
    assert (budget.used, budget.num_holders) == (0, 0)


async def test_a_cancelled_waiter_makes_way_for_those_behind_it() -> None:
    budget = budget_of(10)
    holding = Holder(budget, 5)
    await settle()
    large = Holder(budget, 10)
    await settle()
    small = Holder(budget, 5)
    await settle()
    assert not small.has_it
    large.task.cancel()
    await settle()
    assert small.has_it
    holding.let_go.set()
    small.let_go.set()
    await settle()
    assert budget.used == 0


async def test_a_waiter_cancelled_in_the_moment_it_is_granted_gives_back() -> None:
    budget = budget_of(10)
    holding = Holder(budget, 10)
    await settle()
    waiting = Holder(budget, 10)
    await settle()
    behind = Holder(budget, 10)
    await settle()
    holding.let_go.set()
    await asyncio.sleep(0)  # the holder wakes, and grants
    assert budget.used == 10
    assert not waiting.has_it
    waiting.task.cancel()
    await settle()
    assert not waiting.has_it
    assert behind.has_it
    behind.let_go.set()
    await settle()
    assert budget.used == 0


@pytest.mark.parametrize("seed", range(40))
async def test_no_schedule_of_holding_and_cancelling_leaks_or_exceeds(seed: int) -> None:
    chance = random.Random(seed)
    budget = budget_of(20)
    holders: list[Holder] = []
    for _ in range(120):
        match chance.randrange(4):
            case 0 | 1:
                holders.append(Holder(budget, chance.randint(1, 20)))
            case 2 if holders:
                chance.choice(holders).task.cancel()
            case _ if holders:
                chance.choice(holders).let_go.set()
        for _ in range(chance.randrange(3)):  # every phase of an acquisition is met
            await asyncio.sleep(0)
        assert 0 <= budget.used <= 20
    for holder in holders:
        holder.let_go.set()
    await asyncio.gather(*(holder.task for holder in holders), return_exceptions=True)
    await budget.take(20)  # all of it is there again
    assert (budget.used, budget.num_holders) == (20, 1)
    assert budget.peak <= 20


async def test_a_prompt_that_lent_its_bytes_gets_them_before_a_new_one_that_waits_for_its_end() -> (
    None
):
    budget = Budget(10, max_holders=1)
    await budget.take(10)
    is_back, may_return = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        async with budget.lent(10):
            await may_return.wait()
        is_back.set()

    holder = asyncio.create_task(hold())
    await asyncio.sleep(0)
    new = asyncio.create_task(budget.take(10))
    await asyncio.sleep(0)
    assert not new.done()  # there is one holder already
    may_return.set()
    async with asyncio.timeout(10):
        await is_back.wait()
        await holder
        budget.give_back(10)
        await new
    assert (budget.used, budget.num_holders) == (10, 1)

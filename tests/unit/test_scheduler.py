"""Which server a prompt goes to, and who waits."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from extractor.dispatch.health import Health
from extractor.dispatch.limiter import Limiter
from extractor.dispatch.scheduler import Lane, Scheduler, Slot

#: Rows from here on are suspects.
SUSPECT = 1000


def scheduler_of(*limits: int) -> tuple[Scheduler, list[Lane]]:
    scheduler = Scheduler(lambda ordinal: ordinal >= SUSPECT)
    lanes = [Lane(health=Health(Limiter(limit))) for limit in limits]
    for lane in lanes:
        scheduler.add(lane)
    return scheduler, lanes


async def settled(*coroutines: Coroutine[Any, Any, Slot | None]) -> list[asyncio.Task[Any]]:
    """Tasks of these, after each has gone as far as it can."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    await turn_over()
    return tasks


async def turn_over() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def taken(scheduler: Scheduler, num_tokens: int, *, ordinal: int = 0) -> Slot:
    slot = await scheduler.take(ordinal, num_tokens)
    assert slot is not None
    return slot


async def test_each_prompt_goes_where_the_fewest_tokens_are() -> None:
    scheduler, (one, other) = scheduler_of(8, 8)
    for num_tokens in (100, 30, 30, 30, 30):
        await taken(scheduler, num_tokens)
    assert (one.num_tokens, other.num_tokens) == (100, 120)


async def test_the_server_with_fewer_tokens_may_be_full() -> None:
    scheduler, (one, other) = scheduler_of(1, 8)
    assert (await taken(scheduler, 10)).lane is one
    assert {(await taken(scheduler, 100)).lane for _ in range(3)} == {other}


async def test_first_come_first_served_and_a_released_slot_is_taken() -> None:
    scheduler, (one, _) = scheduler_of(1, 1)
    held = [await taken(scheduler, 10) for _ in range(2)]
    first, second = await settled(scheduler.take(0, 5), scheduler.take(0, 5))
    held[0].release()
    held[0].release()  # again: nothing
    await turn_over()
    assert first.done() and not second.done()
    assert one.num_in_flight == 1
    held[1].release()
    await turn_over()
    assert second.done()


async def test_a_paused_server_gets_nothing_and_a_lowered_limit_is_met_as_slots_are_released() -> (
    None
):
    scheduler, (one, other) = scheduler_of(2, 2)
    one.health.note_stopping(True, now=0)
    held = [await taken(scheduler, 10) for _ in range(2)]
    assert {slot.lane for slot in held} == {other}
    (waiting,) = await settled(scheduler.take(0, 10))
    other.health.limiter.limit = 1
    held[0].release()
    await turn_over()
    assert not waiting.done()
    one.health.note_stopping(False, now=0)
    scheduler.wake()
    await turn_over()
    assert waiting.result().lane is one


async def test_a_suspect_waits_for_an_empty_server_and_keeps_it_to_itself() -> None:
    scheduler, _ = scheduler_of(4, 4)
    held = [await taken(scheduler, number) for number in (10, 20, 30)]
    (alone,) = await settled(scheduler.take(SUSPECT, 5))
    assert not alone.done()
    beside = await taken(scheduler, 1)  # the other server goes on meanwhile
    for slot in held:
        slot.release()
    await turn_over()
    assert alone.result().lane is not beside.lane
    assert {(await taken(scheduler, 1)).lane for _ in range(3)} == {beside.lane}
    alone.result().release()
    assert (await taken(scheduler, 1)).lane is alone.result().lane


async def test_a_prompt_that_becomes_a_suspect_while_it_waits_is_sent_alone() -> None:
    suspects: set[int] = set()
    scheduler, lane = Scheduler(suspects.__contains__), Lane(health=Health(Limiter(2)))
    scheduler.add(lane)
    held = [await taken(scheduler, 10) for _ in range(2)]
    (waiting,) = await settled(scheduler.take(7, 10))
    suspects.add(7)
    held[0].release()
    await turn_over()
    assert not waiting.done()
    held[1].release()
    await turn_over()
    assert waiting.result().is_alone


async def test_suspects_are_sent_one_at_a_time_in_all_servers_and_the_others_go_on() -> None:
    scheduler, (one, other) = scheduler_of(4, 4)
    first, second, third = await settled(*(scheduler.take(SUSPECT, 5) for _ in range(3)))
    assert first.done() and not second.done() and not third.done()
    kept = first.result().lane
    assert {(await taken(scheduler, 1)).lane for _ in range(4)} == {one, other} - {kept}
    first.result().release()
    await turn_over()
    assert second.done() and not third.done()
    assert second.result().lane is kept


async def test_the_only_server_is_kept_for_suspects_until_each_is_answered() -> None:
    scheduler, (lane,) = scheduler_of(4)
    first, second, behind = await settled(
        scheduler.take(SUSPECT, 5), scheduler.take(SUSPECT, 5), scheduler.take(0, 5)
    )
    first.result().release()
    await turn_over()
    assert second.done() and not behind.done()
    second.result().release()
    await turn_over()
    assert behind.result().lane is lane


async def test_a_suspect_waits_for_another_server_when_one_is_lost() -> None:
    scheduler, (one, other) = scheduler_of(4, 4)
    held = [await taken(scheduler, number) for number in (10, 20)]
    (alone,) = await settled(scheduler.take(SUSPECT, 5))
    scheduler.remove(one)
    await turn_over()
    assert not alone.done()
    for slot in held:
        slot.release()
    await turn_over()
    assert alone.result().lane is other


@pytest.mark.parametrize("ordinal", [0, SUSPECT])
async def test_a_cancelled_wait_holds_nobody_up(ordinal: int) -> None:
    scheduler, (lane,) = scheduler_of(1)
    held = await taken(scheduler, 10)
    (cancelled,) = await settled(scheduler.take(ordinal, 5))
    (behind,) = await settled(scheduler.take(0, 5))
    cancelled.cancel()
    await turn_over()
    held.release()
    await turn_over()
    assert behind.result().lane is lane
    assert not lane.is_taken_whole


async def test_after_closing_nobody_gets_a_slot() -> None:
    scheduler, (one, other) = scheduler_of(1, 1)
    held = [await taken(scheduler, 10) for _ in range(2)]
    waiting = await settled(*(scheduler.take(ordinal, 5) for ordinal in (0, SUSPECT, 1)))
    scheduler.close()
    assert [await slot for slot in waiting] == [None] * 3
    for slot in held:
        slot.release()
    assert await scheduler.take(0, 5) is None
    assert (one.num_in_flight, other.num_in_flight) == (0, 0)


async def test_a_slot_granted_at_the_moment_of_a_cancellation_is_given_back() -> None:
    scheduler, (lane,) = scheduler_of(1)
    held = await taken(scheduler, 10)
    (cancelled,) = await settled(scheduler.take(0, 5))
    held.release()
    cancelled.cancel()
    await turn_over()
    assert lane.num_in_flight == lane.num_tokens == 0

"""Which server a prompt goes to, and who waits for whom."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from extractor.dispatch.scheduler import Gate, Turn, Turns


def fleet(*limits: int) -> tuple[Turns, list[Gate]]:
    turns, gates = Turns(), [Gate(limit=limit) for limit in limits]
    for gate in gates:
        turns.add(gate)
    return turns, gates


async def settled(*coroutines: Coroutine[Any, Any, Turn | None]) -> list[asyncio.Task[Any]]:
    """Tasks of these, after each has gone as far as it can."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    await turn_over()
    return tasks


async def turn_over() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def taken(turns: Turns, num_tokens: int, **how: Any) -> Turn:
    turn = await turns.take(num_tokens, **how)
    assert turn is not None
    return turn


async def test_each_prompt_goes_where_the_fewest_tokens_are() -> None:
    turns, (one, other) = fleet(8, 8)
    for num_tokens in (100, 30, 30, 30, 30):
        await turns.take(num_tokens)
    assert (one.num_tokens, other.num_tokens) == (100, 120)


async def test_the_one_with_fewer_tokens_may_be_full() -> None:
    turns, (one, other) = fleet(1, 8)
    assert (await taken(turns, 10)).gate is one
    assert {(await taken(turns, 100)).gate for _ in range(3)} == {other}


async def test_who_came_first_goes_first_and_what_is_given_back_is_taken() -> None:
    turns, (one, _) = fleet(1, 1)
    held = [await taken(turns, 10) for _ in range(2)]
    first, second = await settled(turns.take(5), turns.take(5))
    held[0].release()
    held[0].release()  # again: nothing
    await turn_over()
    assert first.done() and not second.done()
    assert one.num_in_flight == 1
    held[1].release()
    await turn_over()
    assert second.done()


async def test_nothing_goes_to_a_shut_gate_and_a_lowered_limit_is_met_as_turns_end() -> None:
    turns, (one, other) = fleet(2, 2)
    one.is_open = False
    held = [await taken(turns, 10) for _ in range(2)]
    assert {turn.gate for turn in held} == {other}
    (waiting,) = await settled(turns.take(10))
    other.limit = 1
    held[0].release()
    await turn_over()
    assert not waiting.done()
    one.is_open = True
    turns.wake()
    await turn_over()
    assert waiting.result().gate is one


async def test_who_waits_for_one_server_gets_no_other_and_hears_when_it_goes() -> None:
    turns, (one, other) = fleet(1, 1)
    await turns.take(10)
    (pinned,) = await settled(turns.take(5, only=one))
    assert not pinned.done() and other.is_free
    turns.remove(one)
    await turn_over()
    assert pinned.result() is None
    assert await turns.take(5, only=one) is None


async def test_a_prompt_that_must_be_alone_waits_for_an_empty_server_and_keeps_it_so() -> None:
    turns, (one, other) = fleet(4, 4)
    held = [await taken(turns, number) for number in (10, 20, 30)]
    (alone,) = await settled(turns.take(5, is_alone=True))
    # It waits for the one with the least to do, which gets nothing new meanwhile.
    kept = one if one.is_kept else other
    assert kept.num_tokens == min(one.num_tokens, other.num_tokens)
    beside = await taken(turns, 1)
    assert beside.gate is not kept
    for turn in held:
        turn.release()
    await turn_over()
    assert alone.result().gate is kept
    assert {(await taken(turns, 1)).gate for _ in range(3)} == {beside.gate}
    alone.result().release()
    assert (await taken(turns, 1)).gate is kept


async def test_there_is_one_such_prompt_at_a_time_in_all_servers() -> None:
    turns, _ = fleet(4, 4)
    first, second = await settled(turns.take(5, is_alone=True), turns.take(5, is_alone=True))
    assert first.done() and not second.done()
    first.result().release()
    await turn_over()
    assert second.done()


async def test_the_server_that_was_kept_may_go() -> None:
    turns, (one, other) = fleet(4, 4)
    held = [await taken(turns, number) for number in (10, 20)]
    (alone,) = await settled(turns.take(5, is_alone=True))
    kept, left = (one, other) if one.is_kept else (other, one)
    turns.remove(kept)
    await turn_over()
    assert left.is_kept and not alone.done()
    for turn in held:
        turn.release()
    await turn_over()
    assert alone.result().gate is left


async def test_the_server_that_was_kept_may_shut() -> None:
    turns, (one, other) = fleet(4, 4)
    held = [await taken(turns, number) for number in (10, 20)]
    (alone,) = await settled(turns.take(5, is_alone=True))
    kept, left = (one, other) if one.is_kept else (other, one)
    kept.is_open = False
    for turn in held:
        turn.release()
    await turn_over()
    assert alone.result().gate is left
    assert not kept.is_kept


@pytest.mark.parametrize("is_alone", [False, True])
async def test_a_wait_that_is_cancelled_holds_nobody_up(is_alone: bool) -> None:
    turns, (gate,) = fleet(1)
    held = await taken(turns, 10)
    (cancelled,) = await settled(turns.take(5, is_alone=is_alone))
    (behind,) = await settled(turns.take(5))
    cancelled.cancel()
    await turn_over()
    held.release()
    await turn_over()
    assert behind.result().gate is gate
    assert not gate.is_kept


async def test_after_closing_nobody_gets_a_turn() -> None:
    turns, (one, other) = fleet(1, 1)
    held = [await taken(turns, 10) for _ in range(2)]
    waiting = await settled(
        turns.take(5), turns.take(5, only=one), turns.take(5, is_alone=True), turns.take(5)
    )
    turns.close()
    assert [await turn for turn in waiting] == [None] * 4
    for turn in held:
        turn.release()
    assert await turns.take(5) is None
    assert (one.num_in_flight, other.num_in_flight) == (0, 0)


async def test_a_turn_that_is_granted_in_the_moment_of_a_cancellation_is_given_back() -> None:
    turns, (gate,) = fleet(1)
    held = await taken(turns, 10)
    (cancelled,) = await settled(turns.take(5))
    held.release()
    cancelled.cancel()
    await turn_over()
    assert gate.num_in_flight == gate.num_tokens == 0

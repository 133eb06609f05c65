"""How many prompts are under way at a time."""

from __future__ import annotations

import asyncio

from extractor.dispatch.places import LEAST_LIGHT_BYTES, LIGHT_BYTES, Place, Places, num_places


async def taken(places: Places, dump_bytes: int) -> list[Place]:
    """All that can be taken at once."""
    found: list[Place] = []
    while True:
        taking = asyncio.ensure_future(places.take(dump_bytes))
        await asyncio.sleep(0)
        if not taking.done():
            taking.cancel()
            return found
        found.append(taking.result())


async def test_large_prompts_are_twice_as_many_as_requests_and_no_more() -> None:
    places = Places()
    places.resize(4)
    assert await taken(places, LIGHT_BYTES + 1) == [Place(0)] * num_places(4)
    assert num_places(4) == 8


async def test_small_ones_are_a_group_more_within_their_bytes() -> None:
    places = Places()
    places.resize(4)
    assert len(await taken(places, 1)) == LIGHT_BYTES // LEAST_LIGHT_BYTES + 8
    places = Places()
    places.resize(4)
    assert len(await taken(places, LIGHT_BYTES // 4)) == 4 + 8


async def test_whoever_waits_gets_whichever_place_is_free_first() -> None:
    places = Places()
    found = await taken(places, LIGHT_BYTES)
    assert [place.light_bytes for place in found] == [LIGHT_BYTES, 0, 0]
    for place in found:
        waiting = asyncio.ensure_future(places.take(LIGHT_BYTES))
        await asyncio.sleep(0)
        assert not waiting.done()
        places.give_back(place)
        assert await waiting == place


async def test_more_room_lets_those_in_who_wait() -> None:
    places = Places()
    await taken(places, LIGHT_BYTES + 1)
    waiting = asyncio.ensure_future(places.take(LIGHT_BYTES + 1))
    await asyncio.sleep(0)
    places.resize(2)
    assert await waiting == Place(0)
    places.resize(1)  # of those out, none is called back
    assert await taken(places, LIGHT_BYTES + 1) == []

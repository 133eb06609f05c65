"""Rows are read beside the event loop, however the reading ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import aclosing

from helpers import make_prompts, prompt_of

from extractor.core.timings import DispatchTimings
from extractor.intake.prompt_stream import in_thread
from prompts.types import BadRow, Prompt


async def test_the_event_loop_goes_on_while_a_reader_that_is_not_needed_any_more_ends() -> None:
    """It may be passing over a million settled rows, and is not to be stopped in that."""
    is_reading, may_end = threading.Event(), threading.Event()
    ends = []

    def rows() -> Iterator[Prompt | BadRow]:
        yield prompt_of(make_prompts(1)[0])
        is_reading.set()
        ends.append(may_end.wait(5))

    async def taken() -> None:
        async with aclosing(in_thread(rows(), DispatchTimings(read_rows=1))) as made:
            async for _ in made:
                # Else the second batch may be cancelled before its thread comes to it.
                assert await asyncio.to_thread(is_reading.wait, 5)
                return

    taking = asyncio.create_task(taken())
    await asyncio.to_thread(is_reading.wait, 5)
    asyncio.get_running_loop().call_later(0.05, may_end.set)
    await taking
    assert ends == [True]

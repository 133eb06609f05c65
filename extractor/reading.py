"""Edge: prompts read and tokenised on a thread of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from prompts.types import BadRow, Prompt

#: Prompts tokenised per visit to the reading thread.
READ_BATCH = 16


async def in_thread(rows: Iterator[Prompt | BadRow]) -> AsyncIterator[Prompt | BadRow]:
    """The same rows, made one small batch ahead of whoever consumes them."""
    loop = asyncio.get_running_loop()
    thread = ThreadPoolExecutor(1, thread_name_prefix="reader")

    def next_batch() -> list[Prompt | BadRow]:
        return list(islice(rows, READ_BATCH))

    try:
        ahead = loop.run_in_executor(thread, next_batch)
        while batch := await ahead:
            ahead = loop.run_in_executor(thread, next_batch)
            for row in batch:
                yield row
    finally:
        thread.shutdown(wait=True)

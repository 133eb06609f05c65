"""Edge: prompts read on a thread of their own, tokenised there or in processes of their own."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice

from extractor.core.admission import token_bound
from extractor.core.request import Limits
from extractor.core.run_options import Input
from extractor.core.timings import DEFAULT_TIMINGS, DispatchTimings
from prompts.inputs import InputFile
from prompts.pool import RendererPool
from prompts.reading_options import ReadingOptions
from prompts.render import NO_BOUND, Renderer
from prompts.stream import raw_rows, read_prompts
from prompts.token_bound import TokenBound
from prompts.types import BadRow, Prompt

logger = logging.getLogger(__name__)

#: With fewer rows to do, processes cost more seconds to start than they save.
LEAST_ROWS_FOR_WORKERS = 5000
MAX_WORKERS = 8


def num_workers_for(num_rows: int, wanted: int | None) -> int:
    """Processes that tokenise; 0 for none. A quarter of the cores feeds any server we know."""
    if wanted is not None:
        return wanted
    if num_rows < LEAST_ROWS_FOR_WORKERS:
        return 0
    return min(MAX_WORKERS, max(1, (os.cpu_count() or 1) // 4))


def renderer_for(tokenizer: str, reading: ReadingOptions, bound: TokenBound = NO_BOUND) -> Renderer:
    """The tokenizer loaded; none for `none`. Raises TokenizerError."""
    if tokenizer == NO_TOKENIZER:
        return Renderer(options=reading, bound=bound)
    return Renderer.load(tokenizer, reading, bound=bound)


def renderer_of_run(options: Input, tokenizer: str, limits: Limits | None) -> Renderer:
    """The renderer for the rows of a run. `limits`: None if no server is known."""
    return renderer_for(tokenizer, options.reading, token_bound(options.policy, limits))


@contextmanager
def prompts_of(
    files: Sequence[InputFile],
    renderer: Renderer,
    *,
    num_workers: int,
    skip: Callable[[int], bool] = lambda ordinal: False,
) -> Iterator[Iterator[Prompt | BadRow]]:
    """The prompts of all rows but the skipped ones, in order.

    Rows of ids need no tokenizer, so without one there are no processes either.
    """
    if not num_workers or renderer.source is None:
        yield read_prompts(files, renderer, skip=skip)
        return
    with RendererPool(renderer, num_workers=num_workers) as pool:
        yield pool.prompts_from(raw_rows(files, renderer.options, skip=skip))


async def in_thread(
    rows: Iterator[Prompt | BadRow], timings: DispatchTimings = DEFAULT_TIMINGS.dispatch
) -> AsyncGenerator[Prompt | BadRow, None]:
    """The same rows, made one small batch ahead of whoever consumes them."""
    loop = asyncio.get_running_loop()
    thread = ThreadPoolExecutor(1, thread_name_prefix="reader")

    def next_batch() -> list[Prompt | BadRow]:
        until = time.monotonic() + timings.read_s
        batch: list[Prompt | BadRow] = []
        for row in islice(rows, timings.read_rows):
            batch.append(row)
            if time.monotonic() >= until:
                break
        return batch

    ahead = loop.run_in_executor(thread, next_batch)
    try:
        while batch := await ahead:
            ahead = loop.run_in_executor(thread, next_batch)
            if logger.isEnabledFor(logging.DEBUG):
                first, last = batch[0].ordinal, batch[-1].ordinal
                logger.debug("read rows=%d first=%d last=%d", len(batch), first, last)
            for row in batch:
                yield row
    finally:
        ahead.cancel()  # nobody is going to ask what became of it
        # It may be passing over a million rows that nobody wants: signals are heard meanwhile.
        await asyncio.to_thread(thread.shutdown)


#: In place of a tokenizer's path: there are rows of ids only.
NO_TOKENIZER = "none"

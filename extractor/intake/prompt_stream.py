"""Edge: prompts read on a thread of their own, rendered and tokenised in worker processes."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from extractor.core.admission import token_bound
from extractor.core.request import Limits
from extractor.core.run_options import Input
from extractor.core.timings import DEFAULT_TIMINGS, DispatchTimings
from prompts.inputs import InputFile
from prompts.pool import RendererPool
from prompts.reading_options import ReadingOptions
from prompts.stream import raw_rows
from prompts.token_bound import NO_BOUND, TokenBound
from prompts.types import BadRow, Prompt
from prompts.worker_messages import DEFAULT_LIMITS, CodeLimits

logger = logging.getLogger(__name__)

#: With fewer rows to do, more processes than one cost more seconds to start than they save.
MIN_ROWS_TO_SHARE = 5000
MAX_WORKERS = 8


def num_workers_for(num_rows: int, wanted: int | None) -> int:
    """Processes that tokenise. A quarter of the cores feeds any server we know."""
    if wanted is not None:
        return wanted
    if num_rows < MIN_ROWS_TO_SHARE:
        return 1
    return min(MAX_WORKERS, max(1, (os.cpu_count() or 1) // 4))


def pool_for(
    tokenizer: str,
    reading: ReadingOptions,
    bound: TokenBound = NO_BOUND,
    limits: CodeLimits = DEFAULT_LIMITS,
) -> RendererPool:
    """Renders with a tokenizer that is not loaded yet; for `none`, reads rows of ids only."""
    source = None if tokenizer == NO_TOKENIZER else tokenizer
    return RendererPool(source, reading, bound=bound, limits=limits)


def pool_of_run(
    options: Input, tokenizer: str, limits: Limits | None, code_limits: CodeLimits
) -> RendererPool:
    """The same for the rows of a run. `limits`: None if no server is known."""
    return pool_for(tokenizer, options.reading, token_bound(options.policy, limits), code_limits)


def prompts_of(
    files: Sequence[InputFile],
    pool: RendererPool,
    *,
    num_workers: int = 1,
    skip: Callable[[int], bool] = lambda ordinal: False,
    most: int | None = None,
) -> Iterator[Prompt | BadRow]:
    """The prompts of all rows but the skipped ones, in order.

    A skipped row is counted but neither parsed nor tokenised, so a resumed run pays little for what
    is done. `most`: no further row is looked for after so many. Raises `InputError`,
    `TokenizerError`.
    """
    rows = islice(raw_rows(files, pool.options, skip=skip), most)
    return pool.prompts_from(rows, num_workers=num_workers)


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

"""Measures the prefill speed of servers with a sample of the prompts."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Sequence

from extractor.core.failure import Failure
from extractor.core.request import Request
from extractor.pipeline.forecast import Speed
from extractor.servers.client import Client
from prompts.types import Prompt

#: Request ids without the prefix of a run's, so that the plugin writes no dumps.
PROBE_RID = "dry-run"


async def measured_speed(
    clients: Sequence[Client], prompts: Sequence[Prompt], concurrency: int, *, probe_s: float
) -> Speed | None:
    """The servers' prefill speed, from the prompts that they process in `probe_s`; None if none is.

    `concurrency`: requests in flight with each server."""
    # Several dry runs may use one server at the same time, and it rejects duplicate rids.
    rid = f"{PROBE_RID}-{secrets.token_hex(4)}"
    waiting = deque(enumerate(prompts))
    num_tokens = num_prompts = 0
    started = time.monotonic()

    async def send(client: Client) -> None:
        nonlocal num_tokens, num_prompts
        while waiting and time.monotonic() - started < probe_s:
            number, prompt = waiting.popleft()
            reply = await client.generate(Request(rid=f"{rid}-{number}", prompt=prompt))
            if not isinstance(reply, Failure):
                num_tokens += prompt.num_tokens
                num_prompts += 1

    for client in clients:
        await client.generate(Request(rid=f"{rid}-warm-up", prompt=prompts[0]))
    started = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(concurrency, len(prompts))):
            for client in clients:
                tasks.create_task(send(client))
    seconds = time.monotonic() - started
    if not num_tokens:
        return None
    return Speed(tokens_per_s=num_tokens / seconds, num_prompts=num_prompts, seconds=seconds)

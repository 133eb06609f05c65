"""Prompts of random tokens, the server they are for, and their sending at a fixed concurrency."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.command import Failed
from extractor.core.failure import Failure
from extractor.core.locations import DumpRoot
from extractor.core.request import Request
from extractor.dumps.discovery import scan_writers
from extractor.dumps.dump_reader import Rank
from extractor.servers.client import Client
from prompts.types import Prompt, RowOrigin


def serving_ranks(dump_root: Path) -> tuple[Rank, ...]:
    """At least one rank of a running server that dumps there. Raises Failed if there is none."""
    ranks = scan_writers(DumpRoot(path=dump_root)).alive
    if not ranks:
        raise Failed(f"no server with the plugin announces itself under {dump_root}")
    return ranks


def random_prompts(
    count: int, *, num_tokens: int, vocab_size: int, generator: np.random.Generator
) -> list[Prompt]:
    """`count` prompts of `num_tokens` random ids each, none of them special (0..2)."""
    return [
        Prompt(
            ordinal=ordinal,
            origin=RowOrigin(source="random", line=ordinal + 1),
            label=None,
            input_ids=generator.integers(3, vocab_size, size=num_tokens, dtype=np.int32),
            loss_mask=np.ones(num_tokens, dtype=np.uint8),
        )
        for ordinal in range(count)
    ]


def prompts_for(dump_root: Path, count: int, *, num_tokens: int) -> list[Prompt]:
    """Random prompts for the server that dumps there, the same each time. Raises Failed if there
    is none."""
    return random_prompts(
        count,
        num_tokens=num_tokens,
        vocab_size=serving_ranks(dump_root)[0].ready.model.vocab_size,
        generator=np.random.default_rng(0),
    )


async def prefill_s(url: str, prompts: Sequence[Prompt], *, concurrency: int) -> float:
    """Seconds to prefill all `prompts`. Rids are ours, so a server with the plugin dumps them.

    Raises Failed when a request fails.
    """
    tag = secrets.token_hex(4)
    async with Client(url, concurrency=concurrency, request_timeout_s=600.0) as client:
        slots = asyncio.Semaphore(concurrency)

        async def send(prompt: Prompt) -> None:
            async with slots:
                reply = await client.generate(
                    Request(rid=f"xtr-bench-{tag}-{prompt.ordinal}", prompt=prompt)
                )
                if isinstance(reply, Failure):
                    raise Failed(f"{url}: {reply.detail}")
                if reply.prompt_tokens != prompt.num_tokens or reply.cached_tokens:
                    raise Failed(f"{url}: {reply}")

        begun = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for prompt in prompts:
                group.create_task(send(prompt))
        return time.perf_counter() - begun

"""Prompts of random tokens, and the sending of them at a fixed concurrency."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from extractor.client import Client
from extractor.plan import Request
from extractor.retry import Failure
from prompts.types import Prompt
from server_patch.dump_format import is_dump_name, is_error_name


def random_prompts(
    count: int, *, num_tokens: int, vocab_size: int, generator: np.random.Generator
) -> list[Prompt]:
    """`count` prompts of `num_tokens` random ids each, none of them special (0..2)."""
    return [
        Prompt(
            ordinal=ordinal,
            source="random",
            line=ordinal + 1,
            label=None,
            input_ids=generator.integers(3, vocab_size, size=num_tokens, dtype=np.int32),
            loss_mask=np.ones(num_tokens, dtype=np.uint8),
        )
        for ordinal in range(count)
    ]


async def prefill_s(url: str, prompts: Sequence[Prompt], *, concurrency: int) -> float:
    """Seconds to prefill all `prompts`. Rids are ours, so a server with the plugin dumps them.

    Raises RuntimeError when a request fails.
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
                    raise RuntimeError(f"{url}: {reply.detail}")
                if reply.prompt_tokens != prompt.num_tokens or reply.cached_tokens:
                    raise RuntimeError(f"{url}: {reply}")

        begun = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for prompt in prompts:
                group.create_task(send(prompt))
        return time.perf_counter() - begun


class NullSink:
    """Removes dumps as they appear and counts them: a client that costs nothing.

    A process of its own, so that it takes nothing from the one that sends the prompts.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        context = multiprocessing.get_context("spawn")
        self._stop = context.Event()
        self._counts = context.Array("q", 3)  # dumps, error records, bytes
        self._process = context.Process(
            target=_sink, args=(tuple(directories), self._stop, self._counts), daemon=True
        )

    def __enter__(self) -> NullSink:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._process.join()

    @property
    def num_dumps(self) -> int:
        return int(self._counts[0])

    @property
    def num_errors(self) -> int:
        return int(self._counts[1])

    @property
    def num_bytes(self) -> int:
        return int(self._counts[2])


def _sink(directories: Sequence[Path], stop: Any, counts: Any) -> None:
    is_last = False
    while not is_last:
        is_last = stop.is_set()  # looked at before the last sweep, which then misses nothing
        if not sum(_sweep(directory, counts) for directory in directories):
            stop.wait(0.005)


def _sweep(directory: Path, counts: Any) -> int:
    found = 0
    with suppress(FileNotFoundError):
        for entry in os.scandir(directory):
            if is_dump_name(entry.name):
                counts[0] += 1
                counts[2] += entry.stat().st_size
            elif is_error_name(entry.name):
                counts[1] += 1
            else:
                continue
            os.unlink(entry.path)
            found += 1
    return found

"""Does anything grow? Memory of a server with the plugin, over many requests.

    python -m benchmarks.soak --model DIR [--requests 10000] -- --attention-backend triton …

Prints a line per thousand requests: resident memory of the scheduler and of the writer processes,
files under the dump root, and memory used on the GPU where there is one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil

from benchmarks.engines import Engine, EngineSpec, engine
from benchmarks.load import prefill_s, random_prompts
from benchmarks.sinks import NullSink
from extractor.serve import free_port


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What the server holds after so many requests."""

    requests: int
    scheduler_bytes: int  # resident, without shared memory
    writer_bytes: int  # likewise, summed over the writer processes
    gpu_bytes: int | None  # used on all devices together
    dump_files: int


def read_memory(server: Engine, *, requests: int) -> Memory:
    """Sizes now."""
    schedulers = [psutil.Process(rank.ready.pid) for rank in server.ranks]
    writers = [child for scheduler in schedulers for child in scheduler.children(recursive=True)]
    return Memory(
        requests=requests,
        scheduler_bytes=sum(map(_private_bytes, schedulers)),
        writer_bytes=sum(map(_private_bytes, writers)),
        gpu_bytes=_gpu_bytes(),
        dump_files=sum(1 for rank in server.ranks for _ in rank.directory.glob("*.dump")),
    )


def _private_bytes(process: psutil.Process) -> int:
    """Without the ring, whose pages count for every process that has touched them."""
    memory = process.memory_info()
    return int(memory.rss - memory.shared)


def _gpu_bytes() -> int | None:
    import torch

    if not torch.cuda.is_available():
        return None
    used = 0
    for device in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(device)
        used += total - free
    return used


async def soak(server: Engine, *, requests: int, prompt_tokens: int) -> list[Memory]:
    """Send `requests` prompts, a thousand at a time; the memory before and after each."""
    generator = np.random.default_rng(0)
    vocab_size = server.ranks[0].ready.vocab_size
    seen = [read_memory(server, requests=0)]
    with NullSink([rank.directory for rank in server.ranks]) as sink:
        for done in range(1000, requests + 1, 1000):
            prompts = random_prompts(
                1000, num_tokens=prompt_tokens, vocab_size=vocab_size, generator=generator
            )
            await prefill_s(server.url, prompts, concurrency=64)
            seen.append(read_memory(server, requests=done))
            show(seen[-1])
    if sink.num_errors or sink.num_dumps < requests:
        raise RuntimeError(f"{sink.num_dumps} dumps and {sink.num_errors} errors for {requests}")
    return seen


def show(memory: Memory) -> None:
    gpu = "" if memory.gpu_bytes is None else f", GPU {memory.gpu_bytes / 1e6:,.1f} MB"
    print(
        f"{memory.requests:6d} requests: scheduler {memory.scheduler_bytes / 1e6:,.1f} MB, "
        f"writers {memory.writer_bytes / 1e6:,.1f} MB, {memory.dump_files} dumps{gpu}",
        flush=True,
    )


async def run(options: argparse.Namespace) -> list[Memory]:
    dump_root = Path(tempfile.mkdtemp(prefix="soak-", dir="/dev/shm"))
    spec = EngineSpec(
        name="soaked",
        model=options.model,
        port=free_port(),
        dump_root=dump_root,
        arguments=tuple(options.arguments),
    )
    try:
        async with engine(spec, log_directory=options.logs) as server:
            return await soak(
                server, requests=options.requests, prompt_tokens=options.prompt_tokens
            )
    finally:
        shutil.rmtree(dump_root, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--logs", type=Path, default=Path("/tmp/soak"))
    parser.add_argument("--json", type=Path, help="where the figures go too")
    parser.add_argument("arguments", nargs="*", help="SGLang arguments, after --")
    options = parser.parse_args()
    seen = asyncio.run(run(options))
    if options.json:
        options.json.write_text(json.dumps([asdict(memory) for memory in seen], indent=1))


if __name__ == "__main__":
    main()

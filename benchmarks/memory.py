"""Whether the plugin's memory stays flat: what a server's processes hold, by requests.

    python -m benchmarks.memory --server URL --dump-dir ROOT [--requests 10000]

Sends random prompts to a running server with the plugin, removes the dumps as they appear, and
prints what the scheduler and its writer processes hold after some thousands of requests, each row
with its growth since the first. Private memory (USS) is what would be freed if the process ended:
the shared ring and the engine's libraries do not hide a leak in it. Exit status 1 if the processes
of a kind grew by more than a hundredth of what was dumped meanwhile and 4 MB, which come and go.
Where there are GPUs, what is used on them is shown too: all of it, whoever uses it.

A scheduler's figure is the engine's and ours together.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from benchmarks.load import prefill_s, random_prompts
from benchmarks.sinks import NullSink
from extractor.collect import Rank
from extractor.writers import scan_writers

#: What an allocator keeps now and then, whatever is asked of it.
NOISE_BYTES = 4_000_000


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What the processes of one server hold."""

    requests: int
    dump_bytes: int
    schedulers: int  # bytes, of all ranks
    writers: int  # bytes, of all ranks' writer processes
    gpu: int | None  # bytes, used on all devices

    def line(self, first: Reading) -> str:
        shown = (
            f"{self.requests:7,d} requests, {self.dump_bytes / 1e9:6.2f} GB dumped: "
            f"schedulers {self.schedulers / 1e6:8.1f} MB "
            f"({(self.schedulers - first.schedulers) / 1e6:+6.1f}), "
            f"writers {self.writers / 1e6:6.1f} MB ({(self.writers - first.writers) / 1e6:+6.1f})"
        )
        if self.gpu is not None and first.gpu is not None:
            shown += f", GPU {self.gpu / 1e6:,.0f} MB ({(self.gpu - first.gpu) / 1e6:+.0f})"
        return shown


async def readings(
    url: str,
    ranks: Sequence[Rank],
    *,
    checkpoints: Sequence[int],
    num_tokens: int,
    concurrency: int,
) -> list[Reading]:
    """One reading after each number of requests. Raises RuntimeError when a request fails."""
    generator = np.random.default_rng(0)
    taken: list[Reading] = []
    with NullSink([rank.directory for rank in ranks]) as sink:
        sent = 0
        for checkpoint in checkpoints:
            prompts = random_prompts(
                checkpoint - sent,
                num_tokens=num_tokens,
                vocab_size=ranks[0].ready.vocab_size,
                generator=generator,
            )
            await prefill_s(url, prompts, concurrency=concurrency)
            sent = checkpoint
            taken.append(
                Reading(
                    requests=sent,
                    dump_bytes=sink.num_bytes,
                    schedulers=sum(private_bytes(rank.ready.pid) for rank in ranks),
                    writers=sum(map(private_bytes, writer_pids(ranks))),
                    gpu=gpu_bytes(),
                )
            )
            print(taken[-1].line(taken[0]), flush=True)
        if sink.num_errors:
            raise RuntimeError(f"{sink.num_errors} error records")
    return taken


def writer_pids(ranks: Sequence[Rank]) -> Iterator[int]:
    """The writer processes: the schedulers' children that run our scribe."""
    for rank in ranks:
        for child in psutil.Process(rank.ready.pid).children():
            if any("server_patch.scribe" in argument for argument in child.cmdline()):
                yield child.pid


def private_bytes(pid: int) -> int:
    return int(psutil.Process(pid).memory_full_info().uss)


def gpu_bytes() -> int | None:
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    used = 0
    for device in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(device)
        used += total - free
    return used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--server", required=True, help="URL of a server with the plugin")
    parser.add_argument("--dump-dir", type=Path, required=True, help="where it dumps")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=32)
    options = parser.parse_args()
    ranks = scan_writers(options.dump_dir).alive
    if not ranks:
        sys.exit(f"no server with the plugin announces itself under {options.dump_dir}")
    tenths = sorted({max(1, options.requests * tenth // 10) for tenth in (1, 2, 5, 10)})
    taken = asyncio.run(
        readings(
            options.server,
            ranks,
            checkpoints=tenths,
            num_tokens=options.prompt_tokens,
            concurrency=options.concurrency,
        )
    )
    first, last = taken[0], taken[-1]
    allowed = (last.dump_bytes - first.dump_bytes) // 100 + NOISE_BYTES
    grown = max(last.schedulers - first.schedulers, last.writers - first.writers)
    if grown > allowed:
        sys.exit(f"grew by {grown / 1e6:.1f} MB, allowed are {allowed / 1e6:.1f} MB")


if __name__ == "__main__":
    main()

"""Whether the plugin's memory stays flat: what a server's processes hold, by requests.

    python -m benchmarks.memory --server URL --dump-dir ROOT [--requests 10000]

Sends random prompts to a running server with the plugin, removes the dumps as they appear, and
prints what the scheduler and its writer processes hold after each tenth of the requests, with the
growth since the first. Private memory (USS) is what would be freed if the process ended: the shared
ring and the engine's libraries do not hide a leak in it. Where there are GPUs, what is used on them
is shown too: all of it, whoever uses it.

Exit status 1 if the processes of a kind leak: a leak grows from each tenth to the next, while what
an allocator keeps of the largest batch so far comes in a few steps. So the growth between two
readings counts, and of all of them the median, which may be a hundredth of what was dumped between.

A scheduler's figure is the engine's and ours together.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

import numpy as np
import psutil

from benchmarks.command import Failed, add_server, command_parser, number_from, run_command
from benchmarks.load import prefill_s, random_prompts, serving_ranks
from benchmarks.sinks import NullSink
from extractor.dumps.dump_reader import Rank

#: Of what is dumped between two readings, how much a process may grow: less than any part of a dump
#: that could be kept by mistake, its header apart.
ALLOWED = 0.01


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


def leak(taken: Sequence[Reading], kind: Literal["schedulers", "writers"]) -> float:
    """How much of what is dumped the processes of a `kind` keep, by the median of all pairs of
    neighbours among at least two readings. Negative when they shrink."""
    shares = [
        (getattr(later, kind) - getattr(earlier, kind)) / (later.dump_bytes - earlier.dump_bytes)
        for earlier, later in pairwise(taken)
    ]
    return float(median(shares))


async def readings(
    url: str,
    ranks: Sequence[Rank],
    *,
    checkpoints: Sequence[int],
    num_tokens: int,
    concurrency: int,
) -> list[Reading]:
    """One reading after each number of requests. Raises Failed when a request fails."""
    generator = np.random.default_rng(0)
    taken: list[Reading] = []
    with NullSink([rank.path for rank in ranks]) as sink:
        sent = 0
        for checkpoint in checkpoints:
            prompts = random_prompts(
                checkpoint - sent,
                num_tokens=num_tokens,
                vocab_size=ranks[0].ready.model.vocab_size,
                generator=generator,
            )
            await prefill_s(url, prompts, concurrency=concurrency)
            sent = checkpoint
            taken.append(
                Reading(
                    requests=sent,
                    dump_bytes=sink.num_bytes,
                    schedulers=sum(private_bytes(rank.ready.process.pid) for rank in ranks),
                    writers=sum(map(private_bytes, writer_pids(ranks))),
                    gpu=gpu_bytes(),
                )
            )
            print(taken[-1].line(taken[0]), flush=True)
        if sink.num_errors:
            raise Failed(f"{sink.num_errors} error records")
    return taken


def writer_pids(ranks: Sequence[Rank]) -> Iterator[int]:
    """The writer processes: the schedulers' children that run `writer_process`."""
    for rank in ranks:
        for child in psutil.Process(rank.ready.process.pid).children():
            if any("server_patch.writer_process" in argument for argument in child.cmdline()):
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
    parser = command_parser(__doc__, __file__)
    add_server(parser)
    parser.add_argument("--requests", type=number_from(10), default=10_000, help="in all")
    parser.add_argument("--prompt-tokens", type=number_from(1), default=64, help="of each")
    parser.add_argument("--concurrency", type=number_from(1), default=32, help="requests at once")
    options = parser.parse_args()
    ranks = serving_ranks(options.dump_dir)
    tenths = [options.requests * tenth // 10 for tenth in range(1, 11)]
    taken = asyncio.run(
        readings(
            options.server,
            ranks,
            checkpoints=tenths,
            num_tokens=options.prompt_tokens,
            concurrency=options.concurrency,
        )
    )
    leaks = {kind: leak(taken, kind) for kind in ("schedulers", "writers")}
    shown = ", ".join(f"{kind} keep {share:.2%}" for kind, share in leaks.items())
    if max(leaks.values()) > ALLOWED:
        sys.exit(f"of what is dumped, {shown}; allowed is {ALLOWED:.0%}")
    print(f"of what is dumped, {shown}")


if __name__ == "__main__":
    run_command(main)

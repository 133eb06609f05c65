"""Measures the error between canaries of the same model and of others, to choose a tolerance.

    python -m benchmarks.canary_noise --server URL --dump-dir ROOT --keep FILE [--rounds 20]
    python -m benchmarks.canary_noise --server URL --dump-dir ROOT --against FILE [--rounds 20]

Sends the canary of `extractor run` to a running server with the plugin, first while the server is
idle, then while it processes other prompts, so that the canary shares batches with them. Prints the
largest error of any state (extractor/servers/canary.py) against a reference: the first canary of
this server, which --keep writes to a file, or the canary in the file of --against. Use --against
with a server that was started differently (another attention backend, chunk size or checkpoint) to
measure the effect.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from benchmarks.command import Failed, add_server, command_parser, number_from, run_command
from benchmarks.load import prefill_s, random_prompts
from extractor.core.run_options import Input, RunOptions, Servers
from extractor.dumps.collector import Collector
from extractor.servers.canary import Comparison, compare, ids_of
from extractor.servers.client import Client
from extractor.servers.probe import require_probe
from extractor.servers.server_facts import facts_of
from extractor.servers.target import Target, require_target

#: Number of prompts that the server processes together with the canary, and their length in tokens.
BESIDE = 48
BESIDE_TOKENS = 200


async def canaries(
    client: Client, target: Target, count: int, ids: Sequence[int] | None
) -> list[bytes]:
    """Request `count` canaries, one after another."""
    return [
        await require_probe(client, target, run_id=secrets.token_hex(4), canary_ids=ids)
        for _ in range(count)
    ]


@asynccontextmanager
async def load(target: Target) -> AsyncIterator[None]:
    """Keep the server busy with other prompts within the block."""
    generator = np.random.default_rng(1)

    async def send() -> None:
        while True:
            prompts = random_prompts(
                BESIDE,
                num_tokens=BESIDE_TOKENS,
                vocab_size=target.ready.model.vocab_size,
                generator=generator,
            )
            await prefill_s(target.url, prompts, concurrency=BESIDE)

    # Their dumps are not awaited, so the collector removes them.
    collector = Collector(target.ranks, rid_prefix="xtr-bench-")
    tasks = [asyncio.create_task(send()), asyncio.create_task(collector.run())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await collector.clear()


def line(name: str, comparisons: Sequence[Comparison]) -> str:
    worst = max(comparisons, key=lambda comparison: comparison.error)
    return (
        f"{name:12} {len(comparisons):3} canaries: largest error {worst.error:.6f} at "
        f"{worst.state}, tolerance {worst.tolerance:g}"
    )


async def measure(
    url: str, root: Path, *, rounds: int, keep: Path | None, against: Path | None
) -> None:
    options = RunOptions(
        input=Input(paths=(Path("none"),)), servers=Servers(urls=(url,), dump_root=root)
    )
    reference = None if against is None else against.read_bytes()
    ids = None if reference is None else ids_of(reference).tolist()
    async with Client(url, concurrency=BESIDE + 1, request_timeout_s=600.0) as client:
        target = await require_target(client, options)
        print(f"{target.ready.model.path}: {facts_of(target.ready)}")
        alone = await canaries(client, target, rounds, ids)
        if reference is None:
            reference = alone[0]
        if keep is not None:
            keep.write_bytes(reference)
        print(line("alone", [compare(reference, canary) for canary in alone]))
        async with load(target):
            beside = await canaries(client, target, rounds, ids)
        print(line("under load", [compare(reference, canary) for canary in beside]))


def main() -> None:
    parser = command_parser(__doc__, __file__)
    add_server(parser)
    parser.add_argument("--rounds", type=number_from(2), default=20, help="canaries of each kind")
    parser.add_argument("--keep", type=Path, help="file for the first canary")
    parser.add_argument("--against", type=Path, help="file of a canary to compare with")
    options = parser.parse_args()
    if options.keep is not None and options.against is not None:
        raise Failed("--keep and --against exclude each other")
    asyncio.run(
        measure(
            options.server,
            options.dump_dir,
            rounds=options.rounds,
            keep=options.keep,
            against=options.against,
        )
    )


if __name__ == "__main__":
    run_command(main)

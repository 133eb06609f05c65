"""What the plugin costs: prefill tokens/s of a server with it over one without, in one run.

    python benchmarks/prefill_overhead.py --model DIR [--tp 2] -- --attention-backend triton …

Both servers run side by side on the same device(s), one of them idle at any time. Rounds are
interleaved (plain, patched, patched, plain, …), each with fresh random prompts; the ratio is taken
round by round, so that a drifting machine does not show in it. Dumps are removed as they appear.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines import Engine, EngineSpec, engines
from benchmarks.load import NullSink, prefill_s, random_prompts
from extractor.serve import free_port
from server_patch.stats import STATS_NAME


@dataclass(frozen=True, kw_only=True)
class Result:
    """One prompt length."""

    prompt_tokens: int
    plain_tokens_per_s: float  # median over the rounds
    patched_tokens_per_s: float
    ratio_median: float
    ratio_min: float
    ratio_max: float
    dump_gigabytes_per_s: float  # median
    num_dumps: int
    num_errors: int
    tap_ms_per_forward: float  # time of the forward thread in the tap, the ring's wait included
    ring_wait_s: float


async def measure(
    plain: Engine,
    patched: Engine,
    *,
    prompt_tokens: int,
    tokens_per_round: int,
    rounds: int,
    concurrency: int,
    seed: int = 0,
) -> Result:
    """Interleaved rounds after one warm-up of each server."""
    generator = np.random.default_rng(seed)
    vocab_size = patched.ranks[0].ready.vocab_size
    count = max(concurrency, tokens_per_round // prompt_tokens)

    def prompts() -> Any:
        return random_prompts(
            count, num_tokens=prompt_tokens, vocab_size=vocab_size, generator=generator
        )

    speeds: dict[str, list[float]] = {"plain": [], "patched": []}
    gigabytes_per_s: list[float] = []
    with NullSink([rank.directory for rank in patched.ranks]) as sink:
        for server in (plain, patched):
            await prefill_s(server.url, prompts(), concurrency=concurrency)
        before = _stats(patched)
        for round_number in range(rounds):
            order = ("plain", "patched") if round_number % 2 == 0 else ("patched", "plain")
            for name in order:
                server = plain if name == "plain" else patched
                bytes_before = sink.num_bytes
                seconds = await prefill_s(server.url, prompts(), concurrency=concurrency)
                speeds[name].append(count * prompt_tokens / seconds)
                if name == "patched":
                    gigabytes_per_s.append((sink.num_bytes - bytes_before) / seconds / 1e9)
        await asyncio.sleep(1.5)  # the plugin shows its counters once a second
        after = _stats(patched)
    ratios = [b / a for a, b in zip(speeds["plain"], speeds["patched"], strict=True)]
    forwards = max(1, after["forwards"] - before["forwards"])
    return Result(
        prompt_tokens=prompt_tokens,
        plain_tokens_per_s=statistics.median(speeds["plain"]),
        patched_tokens_per_s=statistics.median(speeds["patched"]),
        ratio_median=statistics.median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        dump_gigabytes_per_s=statistics.median(gigabytes_per_s),
        num_dumps=sink.num_dumps,
        num_errors=sink.num_errors,
        tap_ms_per_forward=1e3 * (after["tap_seconds"] - before["tap_seconds"]) / forwards,
        ring_wait_s=after["ring_wait_seconds"] - before["ring_wait_seconds"],
    )


def _stats(server: Engine) -> dict[str, float]:
    """The plugin's counters, summed over its writers."""
    total: dict[str, float] = {}
    for rank in server.ranks:
        for name, value in json.loads((rank.directory / STATS_NAME).read_bytes()).items():
            if isinstance(value, int | float):
                total[name] = total.get(name, 0) + value
    return total


def show(result: Result) -> None:
    print(
        f"{result.prompt_tokens:6d} tokens: plain {result.plain_tokens_per_s:10,.0f} tok/s, "
        f"patched {result.patched_tokens_per_s:10,.0f} tok/s, ratio {result.ratio_median:.3f} "
        f"({result.ratio_min:.3f} to {result.ratio_max:.3f}), "
        f"{result.dump_gigabytes_per_s:.2f} GB/s of dumps, "
        f"tap {result.tap_ms_per_forward:.2f} ms a forward, ring wait {result.ring_wait_s:.2f} s, "
        f"{result.num_errors} errors",
        flush=True,
    )


async def run(options: argparse.Namespace) -> list[Result]:
    dump_root = Path(tempfile.mkdtemp(prefix="prefill-overhead-", dir="/dev/shm"))
    arguments = (*options.arguments, "--tp-size", str(options.tp))
    specs = [
        EngineSpec(
            name=name,
            model=options.model,
            port=free_port(),
            dump_root=dump_root if name == "patched" else None,
            arguments=arguments,
        )
        for name in ("plain", "patched")
    ]
    try:
        async with engines(specs, log_directory=options.logs) as running:
            results = []
            for prompt_tokens in options.prompt_tokens:
                results.append(
                    await measure(
                        running["plain"],
                        running["patched"],
                        prompt_tokens=prompt_tokens,
                        tokens_per_round=options.tokens_per_round,
                        rounds=options.rounds,
                        concurrency=options.concurrency,
                    )
                )
                show(results[-1])
            return results
    finally:
        shutil.rmtree(dump_root, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[128, 2048, 8192])
    parser.add_argument("--tokens-per-round", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--logs", type=Path, default=Path("/tmp/prefill-overhead"))
    parser.add_argument("--json", type=Path, help="where the figures go too")
    parser.add_argument("arguments", nargs="*", help="SGLang arguments, after --")
    options = parser.parse_args()
    results = asyncio.run(run(options))
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()

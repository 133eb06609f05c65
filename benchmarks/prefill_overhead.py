"""What the plugin costs: prefill tokens/s of a server with it over one without, in one run.

    python -m benchmarks.prefill_overhead --model DIR [--tp 2] [--sink shm=/dev/shm] \\
        -- --attention-backend triton …

Both servers run side by side on the same device(s), one of them idle at any time; those of several
models (`--model` repeated) start together and are measured in turn. Rounds are interleaved (plain,
patched, patched, plain, …), each with fresh random prompts; the ratio is taken round by round, so
that a drifting machine does not show in it. The dumps are removed as they appear; with `--sink
NAME=DIRECTORY`, in rounds of their own, the real client stores them there. Everything that is
measured runs once before, so that no round is the first to touch memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.command import command_parser, number_from, run_command
from benchmarks.engines import Engine, EngineSpec, engines, free_ports
from benchmarks.load import prefill_s, random_prompts
from benchmarks.sinks import ClientSink, NullSink
from prompts.types import Prompt
from server_patch.stats import STATS_NAME

NULL = "null"


@dataclass(frozen=True, kw_only=True)
class SinkResult:
    """The server with the plugin, its dumps taken by one sink, against the plain server."""

    tokens_per_s: float  # median over the rounds
    ratio_median: float
    ratio_min: float
    ratio_max: float
    tokens_per_s_by_round: list[float]
    gigabytes_per_s: float  # of states; median


@dataclass(frozen=True, kw_only=True)
class Result:
    """One prompt length."""

    prompt_tokens: int
    plain_tokens_per_s: float  # median over the rounds
    plain_tokens_per_s_by_round: list[float]
    sinks: Mapping[str, SinkResult]
    num_errors: int  # error records
    forwards: int
    tap_ms_per_forward: float  # time of the forward thread in the tap, the ring's wait included
    ring_wait_s: float
    ring_bytes: int  # pinned
    ring_peak_bytes: int  # of that, in use at a time since the server's start
    write_gigabytes_per_s: float  # of one writer process while it writes


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is sent, and how often."""

    tokens_per_round: int
    max_requests: int  # per round: short prompts are bound by the number of requests
    rounds: int
    client_rounds: int  # of these, so many with the real client too
    concurrency: int

    def num_prompts(self, prompt_tokens: int) -> int:
        """At least a few forwards' worth, however long the prompts."""
        return max(16, min(self.max_requests, self.tokens_per_round // prompt_tokens))


async def measure(
    plain: Engine,
    patched: Engine,
    *,
    prompt_tokens: int,
    plan: Plan,
    clients: Mapping[str, ClientSink] | None = None,
    seed: int = 0,
) -> Result:
    """Interleaved rounds after one of each server and each client that does not count."""
    generator = np.random.default_rng(seed)
    vocab_size = patched.ranks[0].ready.model.vocab_size
    count = plan.num_prompts(prompt_tokens)
    clients = clients or {}

    def prompts() -> list[Prompt]:
        return random_prompts(
            count, num_tokens=prompt_tokens, vocab_size=vocab_size, generator=generator
        )

    speeds: dict[str, list[float]] = defaultdict(list)
    gigabytes_per_s: dict[str, list[float]] = defaultdict(list)

    async def round_of(name: str) -> None:
        if name in clients:
            with sink.resting():
                done = await clients[name].store(prompts())
            speeds[name].append(done.tokens / done.seconds)
            gigabytes_per_s[name].append(done.stored_bytes / done.seconds / 1e9)
            return
        server = plain if name == "plain" else patched
        before = sink.num_bytes
        seconds = await prefill_s(server.url, prompts(), concurrency=plan.concurrency)
        speeds[name].append(count * prompt_tokens / seconds)
        gigabytes_per_s[name].append((sink.num_bytes - before) / seconds / 1e9)

    with NullSink([rank.path for rank in patched.ranks]) as sink:
        for name in ("plain", NULL, *clients):
            await round_of(name)
        speeds.clear()
        gigabytes_per_s.clear()
        before = _stats(patched)
        for number in range(plan.rounds):
            order = ["plain", NULL, *(clients if number < plan.client_rounds else ())]
            for name in order if number % 2 == 0 else reversed(order):
                await round_of(name)
        await asyncio.sleep(1.5)  # the plugin shows its counters once a second
        after = _stats(patched)
    spent = {name: after[name] - before[name] for name in after}
    forwards = int(spent["forwards"])
    return Result(
        prompt_tokens=prompt_tokens,
        plain_tokens_per_s=statistics.median(speeds["plain"]),
        plain_tokens_per_s_by_round=speeds["plain"],
        sinks={
            name: _sink_result(speeds["plain"], speeds[name], gigabytes_per_s[name])
            for name in (NULL, *clients)
        },
        num_errors=sink.num_errors,
        forwards=forwards,
        tap_ms_per_forward=1e3 * spent["tap_seconds"] / max(1, forwards),
        ring_wait_s=spent["ring_wait_seconds"],
        ring_bytes=sum(rank.ready.capture.ring_bytes for rank in patched.ranks),
        ring_peak_bytes=int(after["ring_peak_bytes"]),
        write_gigabytes_per_s=spent["dump_bytes"] / max(1e-9, spent["write_seconds"]) / 1e9,
    )


def _sink_result(
    plain: list[float], patched: list[float], gigabytes_per_s: list[float]
) -> SinkResult:
    ratios = [b / a for a, b in zip(plain, patched, strict=False)]  # round by round
    return SinkResult(
        tokens_per_s=statistics.median(patched),
        ratio_median=statistics.median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        tokens_per_s_by_round=patched,
        gigabytes_per_s=statistics.median(gigabytes_per_s),
    )


def _stats(server: Engine) -> dict[str, float]:
    """The plugin's counters, summed over its writers."""
    total: dict[str, float] = {}
    for rank in server.ranks:
        for name, value in json.loads((rank.path / STATS_NAME).read_bytes()).items():
            total[name] = total.get(name, 0) + value
    return total


def show(result: Result) -> None:
    """Print one prompt length."""
    print(f"{result.prompt_tokens:6d} tokens: plain {result.plain_tokens_per_s:10,.0f} tok/s")
    for name, sink in result.sinks.items():
        print(
            f"  {name:12s} {sink.tokens_per_s:10,.0f} tok/s, ratio {sink.ratio_median:.3f} "
            f"({sink.ratio_min:.3f} to {sink.ratio_max:.3f}), {sink.gigabytes_per_s:.2f} GB/s"
        )
    print(
        f"  tap {result.tap_ms_per_forward:.2f} ms a forward ({result.forwards} forwards), ring "
        f"wait {result.ring_wait_s:.2f} s, {result.ring_peak_bytes / 1e9:.2f} of "
        f"{result.ring_bytes / 1e9:.2f} GB pinned in use, a writer writes "
        f"{result.write_gigabytes_per_s:.2f} GB/s, {result.num_errors} errors",
        flush=True,
    )


def compare_rivals(model: str, plain_url: str, results: Path | None) -> None:
    """The other routes on the same device, the servers standing idle: a file beside `results`."""
    command = [sys.executable, "-m", "benchmarks.rivals"]
    found = []
    for arguments in (
        ["json", plain_url, "--count", "3"],
        ["huggingface", "--batch", "1"],
        ["huggingface", "--batch", "8"],
    ):
        ran = subprocess.run(
            [*command, *arguments, "--model", model], stdout=subprocess.PIPE, check=False
        )
        print(ran.stdout.decode(), end="", flush=True)
        found.append(json.loads(ran.stdout) if ran.returncode == 0 else {"failed": arguments})
    if results:
        results.with_suffix(".rivals.json").write_text(json.dumps(found, indent=1))


async def run(options: argparse.Namespace) -> None:
    dump_root = Path(tempfile.mkdtemp(prefix="prefill-overhead-", dir="/dev/shm"))
    arguments = (*options.arguments, "--tp-size", str(options.tp))
    if options.rivals:
        arguments += ("--enable-return-hidden-states",)  # allows it; requests ask for it
    ports = free_ports(2 * len(options.models))
    specs = [
        EngineSpec(
            name=f"{name}-{kind}",
            model=model,
            port=ports.pop(),
            dump_root=dump_root / name if kind == "patched" else None,
            arguments=arguments,
        )
        for name, model in options.models.items()
        for kind in ("plain", "patched")
    ]
    try:
        async with engines(specs, log_directory=options.logs) as running:
            for name, model in options.models.items():
                print(f"# {name}", flush=True)
                results = Path(options.json.format(model=name)) if options.json else None
                plain, patched = running[f"{name}-plain"], running[f"{name}-patched"]
                clients = {
                    sink: ClientSink(
                        patched,
                        directory,
                        dump_root / name,
                        arguments=("--concurrency", str(options.concurrency), *options.client),
                    )
                    for sink, directory in options.sinks.items()
                }
                await measure_lengths(plain, patched, clients, options, results)
                if options.rivals:
                    await asyncio.to_thread(compare_rivals, model, plain.url, results)
    finally:
        shutil.rmtree(dump_root, ignore_errors=True)


async def measure_lengths(
    plain: Engine,
    patched: Engine,
    clients: Mapping[str, ClientSink],
    options: argparse.Namespace,
    results: Path | None,
) -> None:
    """One prompt length after the other, each printed and written as soon as it is measured."""
    tokens_per_round = options.tokens_per_round
    if options.gigabytes_per_round:
        of_token = patched.ranks[0].ready.layout.bytes_per_token
        tokens_per_round = int(options.gigabytes_per_round * 1e9 / of_token)
    plan = Plan(
        tokens_per_round=tokens_per_round,
        max_requests=options.max_requests,
        rounds=options.rounds,
        client_rounds=options.client_rounds,
        concurrency=options.concurrency,
    )
    document = []
    for prompt_tokens in options.prompt_tokens:
        result = await measure(
            plain, patched, prompt_tokens=prompt_tokens, plan=plan, clients=clients
        )
        show(result)
        document.append(asdict(result))
        if results:
            results.write_text(json.dumps(document, indent=1))


def main() -> None:
    parser = command_parser(__doc__, __file__)
    parser.add_argument(
        "--model",
        dest="models",
        action="append",
        required=True,
        help="a model folder; repeated: several",
    )
    parser.add_argument("--tp", type=number_from(1), default=1, help="GPUs of a server")
    parser.add_argument(
        "--prompt-tokens", type=number_from(1), nargs="+", default=[128, 2048, 8192], help="of each"
    )
    parser.add_argument("--tokens-per-round", type=number_from(1), default=500_000, help="at most")
    parser.add_argument(
        "--gigabytes-per-round", type=float, help="of states, instead of --tokens-per-round"
    )
    parser.add_argument("--max-requests", type=number_from(1), default=2000, help="in one round")
    parser.add_argument("--rounds", type=number_from(1), default=6, help="of each server")
    parser.add_argument(
        "--client-rounds", type=number_from(1), default=3, help="of these, with --sink"
    )
    parser.add_argument("--concurrency", type=number_from(1), default=64, help="requests at once")
    parser.add_argument(
        "--sink",
        dest="sinks",
        action="append",
        default=[],
        metavar="NAME=DIRECTORY",
        help="measure `extractor run` too, storing there",
    )
    parser.add_argument("--rivals", action="store_true", help="measure other routes too: rivals.py")
    parser.add_argument(
        "--movers", type=number_from(1), help="of `extractor run`, instead of its own number"
    )
    parser.add_argument(
        "--logs", type=Path, default=Path("/tmp/prefill-overhead"), help="of the servers"
    )
    parser.add_argument(
        "--json", help="where the figures go too; {model} in it stands for the model folder's name"
    )
    parser.add_argument("arguments", nargs="*", help="SGLang arguments, after --")
    options = parser.parse_args()
    options.sinks = {
        name: Path(place) for name, _, place in (sink.partition("=") for sink in options.sinks)
    }
    for name, place in options.sinks.items():
        if name in ("plain", NULL) or not place.is_dir() or place == Path():
            parser.error(f"--sink: {name}={place}: a name of its own and a directory are needed")
    if len({Path(model).name for model in options.models}) < len(options.models):
        parser.error("--model: two folders have the same name")
    options.client = ("--movers", str(options.movers)) if options.movers else ()
    options.models = {Path(model).name: model for model in options.models}
    if options.json and len(options.models) > 1 and "{model}" not in options.json:
        parser.error("--json: of several models, each has a file of its own: put {model} in it")
    asyncio.run(run(options))


if __name__ == "__main__":
    run_command(main)

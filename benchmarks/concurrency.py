"""`--concurrency auto` against fixed numbers, on one running server: tokens/s from send to shard.

    python -m benchmarks.concurrency --server URL --dump-dir DIR --out DIR

Every round runs the whole `extractor run` once with each setting, in another order each time,
over the same prompts; `auto` begins from nothing in each. Printed: tokens/s round by round, what
auto came to, and the ratio of auto to the best fixed number: of the medians, and within each round.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.command import (
    add_server,
    child,
    command_parser,
    number_from,
    run_arguments,
    run_command,
    session_of,
)
from benchmarks.load import prompts_for
from benchmarks.sinks import write_prompts

AUTO = "auto"
FIXED = ("1", "4", "16", "64", "256")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One `extractor run`."""

    round: int
    setting: str  # of --concurrency
    tokens_per_s: float  # from the first prompt to the last sealed shard
    limit: int  # requests in flight that it ended with


def run_once(number: int, setting: str, prompts: Path, options: argparse.Namespace) -> Measured:
    """Run the client as a user would. Raises Failed unless it stores every row."""
    with tempfile.TemporaryDirectory(prefix="concurrency-", dir=options.out) as out:
        arguments = run_arguments(
            prompts, out=Path(out), server=options.server, dump_root=options.dump_dir
        )
        command = [sys.executable, "-m", "extractor", *arguments, "--concurrency", setting]
        with child(command) as process:
            assert process.stdout is not None
            session = session_of(process.stdout.read(), process.wait())
    return Measured(
        round=number,
        setting=setting,
        tokens_per_s=session["tokens_per_s"],
        limit=session["servers"][0]["concurrency"],
    )


def show(measured: list[Measured], fixed: list[str]) -> None:
    speeds = {
        setting: [one.tokens_per_s for one in measured if one.setting == setting]
        for setting in (*fixed, AUTO)
    }
    for setting, found in speeds.items():
        rounds = "  ".join(f"{speed:9,.0f}" for speed in found)
        print(f"{setting:>5}: median {statistics.median(found):9,.0f} tok/s   rounds {rounds}")
    print("auto came to", *(one.limit for one in measured if one.setting == AUTO))
    best = max(fixed, key=lambda setting: statistics.median(speeds[setting]))
    ratio = statistics.median(speeds[AUTO]) / statistics.median(speeds[best])
    within = [
        auto / max(speeds[setting][number] for setting in fixed)
        for number, auto in enumerate(speeds[AUTO])
    ]
    print(f"best fixed number: {best}; auto/best {ratio:.3f} (medians)")
    print("auto/best of its own round:", *(f"{one:.3f}" for one in within))


def main() -> None:
    parser = command_parser(__doc__, __file__)
    add_server(parser)
    parser.add_argument("--out", type=Path, required=True, help="a directory for the shards")
    parser.add_argument("--prompts", type=number_from(1), default=2000, help="in each run")
    parser.add_argument("--prompt-tokens", type=number_from(1), default=64, help="of each")
    parser.add_argument("--fixed", nargs="+", default=list(FIXED), help="numbers to compare with")
    parser.add_argument("--rounds", type=number_from(1), default=3, help="of all settings")
    parser.add_argument("--json", type=Path, help="where the figures go too")
    options = parser.parse_args()
    rows = prompts_for(options.dump_dir, options.prompts, num_tokens=options.prompt_tokens)
    options.out.mkdir(parents=True, exist_ok=True)
    measured: list[Measured] = []
    order = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="concurrency-") as directory:
        prompts = Path(directory) / "prompts.jsonl"
        write_prompts(prompts, rows)
        run_once(-1, "16", prompts, options)  # the server's first requests are its slowest
        for number in range(options.rounds):
            for setting in order.sample((*options.fixed, AUTO), len(options.fixed) + 1):
                measured.append(run_once(number, setting, prompts, options))
                print(
                    f"# round {number}, {setting:>4}: {measured[-1].tokens_per_s:9,.0f} tok/s, "
                    f"{measured[-1].limit} in flight",
                    flush=True,
                )
    show(measured, options.fixed)
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in measured], indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)

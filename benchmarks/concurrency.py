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
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

AUTO = "auto"
FIXED = ("1", "4", "16", "64", "256")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One `extractor run`."""

    round: int
    setting: str  # of --concurrency
    tokens_per_s: float  # from the first prompt to the last sealed shard
    limit: int  # requests in flight that it ended with


def write_prompts(path: Path, options: argparse.Namespace) -> None:
    """Rows of random ids, none of them special (0..2)."""
    generator = np.random.default_rng(0)
    with open(path, "w") as file:
        for _ in range(options.prompts):
            ids = generator.integers(3, options.vocab_size, options.prompt_tokens)
            file.write(json.dumps({"input_ids": ids.tolist()}) + "\n")


def run_once(number: int, setting: str, prompts: Path, options: argparse.Namespace) -> Measured:
    """Run the client as a user would. Raises CalledProcessError when it fails."""
    with tempfile.TemporaryDirectory(prefix="concurrency-", dir=options.out) as out:
        command = [
            sys.executable, "-m", "extractor", "run", str(prompts), "--out", out,
            "--server", options.server, "--dump-dir", str(options.dump_dir),
            "--tokenizer", "none", "--concurrency", setting, "--json",
        ]  # fmt: skip
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
        shutil.rmtree(Path(out) / "shards")
    session: dict[str, Any] = json.loads(output)["session"]
    if session["stored"] != options.prompts:
        raise RuntimeError(f"{session['stored']} of {options.prompts} prompts were stored")
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
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--server", required=True, help="URL of a server with the plugin")
    parser.add_argument("--dump-dir", type=Path, required=True, help="where it dumps")
    parser.add_argument("--out", type=Path, required=True, help="a directory for the shards")
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=500)
    parser.add_argument("--fixed", nargs="+", default=list(FIXED), help="numbers to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where the figures go too")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    measured: list[Measured] = []
    order = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="concurrency-") as directory:
        prompts = Path(directory) / "prompts.jsonl"
        write_prompts(prompts, options)
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
    main()

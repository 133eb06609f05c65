"""`--concurrency auto`, the default, against fixed numbers on one running server.

    python -m benchmarks.concurrency --server URL --dump-dir DIR --prompt-tokens 128 2048 64-4096

For each prompt length, every round runs the whole `extractor run` once with each setting over the
same prompts, beginning with another setting than the round before. `64-4096` is a mix: lengths are
spread evenly over the powers of two between both. Printed: every run, then tokens/s from the first
prompt to the last sealed shard (median, min..max) of each setting, and the ratio of the default to
the best fixed number, of the medians and round by round. The best of several medians is above the
typical one by chance, so that noise alone puts this ratio below 1; a fixed number equal to the
default's (shown as `in flight`) shows how much.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.command import (
    add_server,
    child,
    command_parser,
    number_from,
    run_arguments,
    run_command,
    session_of,
)
from benchmarks.load import random_prompts, serving_ranks
from benchmarks.sinks import write_prompts
from prompts.types import Prompt

DEFAULT = "auto"
FIXED = (8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True, repr=False)
class Lengths:
    """Tokens of each prompt: from `shortest` to `longest`, log-uniform."""

    shortest: int
    longest: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Read `128` or `64-4096`. Raises ValueError.

        >>> Lengths.parse("128"), Lengths.parse("64-4096").longest
        (128, 4096)
        """
        shortest, _, longest = text.partition("-")
        lengths = cls(int(shortest), int(longest or shortest))
        if not 1 <= lengths.shortest <= lengths.longest:
            raise ValueError(text)
        return lengths

    def __repr__(self) -> str:
        same = self.shortest == self.longest
        return str(self.shortest) if same else f"{self.shortest}-{self.longest}"

    def prompts(self, tokens: int, *, vocab_size: int) -> list[Prompt]:
        """Random prompts, `tokens` tokens or a little more together; the same at each call."""
        generator = np.random.default_rng(0)
        found: list[Prompt] = []
        while tokens > 0:
            of_it = round(np.exp(generator.uniform(np.log(self.shortest), np.log(self.longest))))
            (prompt,) = random_prompts(
                1, num_tokens=of_it, vocab_size=vocab_size, generator=generator
            )
            found.append(prompt)
            tokens -= of_it
        return found


def run_once(setting: str, prompts: Path, options: argparse.Namespace) -> tuple[float, int]:
    """Run the client as a user does; return its tokens/s, and the requests it had in flight last.

    Raises Failed unless it stores every row.
    """
    with tempfile.TemporaryDirectory(prefix="concurrency-", dir=options.out) as out:
        arguments = run_arguments(
            prompts, out=Path(out), server=options.server, dump_root=options.dump_dir
        )
        command = [sys.executable, "-m", "extractor", *arguments, "--concurrency", setting]
        with child(command) as process:
            assert process.stdout is not None
            session = session_of(process.stdout.read(), process.wait())
    return session["tokens_per_s"], session["servers"][0]["concurrency"]


def rotated(settings: Sequence[str], number: int) -> list[str]:
    """The settings in the order of a round.

    >>> rotated(["8", "64", "auto"], 1)
    ['64', 'auto', '8']
    """
    first = number % len(settings)
    return [*settings[first:], *settings[:first]]


def compare(lengths: Lengths, options: argparse.Namespace, *, vocab_size: int) -> None:
    """Measure and print one prompt length."""
    rows = lengths.prompts(options.tokens, vocab_size=vocab_size)
    settings = [*map(str, options.fixed), DEFAULT]
    print(f"# {len(rows):,} prompts of {lengths} tokens", flush=True)
    speeds: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="concurrency-") as directory:
        prompts = Path(directory) / "prompts.jsonl"
        write_prompts(prompts, rows)
        run_once(DEFAULT, prompts, options)  # the server's first requests are its slowest
        for number in range(options.rounds):
            for setting in rotated(settings, number):
                tokens_per_s, in_flight = run_once(setting, prompts, options)
                speeds[setting].append(tokens_per_s)
                print(
                    f"# round {number}, {setting:>4}: {tokens_per_s:9,.0f} tok/s, "
                    f"{in_flight} in flight",
                    flush=True,
                )
    show(speeds)


def show(speeds: Mapping[str, Sequence[float]]) -> None:
    """Print what each setting had, and the default's ratio to the best fixed number."""
    medians = {setting: statistics.median(found) for setting, found in speeds.items()}
    for setting in sorted(speeds, key=lambda name: (name == DEFAULT, len(name), name)):
        found = speeds[setting]
        print(
            f"{setting:>5}: {medians[setting]:9,.0f} tok/s ({min(found):,.0f}..{max(found):,.0f})"
        )
    best = max(medians.keys() - {DEFAULT}, key=medians.__getitem__)
    ratios = [one / other for one, other in zip(speeds[DEFAULT], speeds[best], strict=True)]
    print(
        f"best fixed number: {best}; {DEFAULT}/best {medians[DEFAULT] / medians[best]:.3f}, round "
        f"by round {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
        flush=True,
    )


def main() -> None:
    parser = command_parser(__doc__, __file__)
    add_server(parser)
    parser.add_argument(
        "--prompt-tokens",
        type=Lengths.parse,
        nargs="+",
        default=[Lengths.parse("128"), Lengths.parse("2048")],
        help="of each prompt: a number, or LEAST-MOST for a mix",
    )
    parser.add_argument("--rounds", type=number_from(1), default=3, help="of all settings")
    parser.add_argument("--tokens", type=number_from(1), default=400_000, help="in each run")
    parser.add_argument(
        "--fixed", type=number_from(1), nargs="+", default=list(FIXED), help="what to compare with"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(), help="where each run's shards are until it ends"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    vocab_size = serving_ranks(options.dump_dir)[0].ready.model.vocab_size
    for lengths in options.prompt_tokens:
        compare(lengths, options, vocab_size=vocab_size)


if __name__ == "__main__":
    run_command(main)

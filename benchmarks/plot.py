"""Draws the README's plot from results of prefill_overhead.py.

python -m benchmarks.plot docs/prefill_overhead.svg NAME=RESULTS.json …
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from benchmarks.prefill_overhead import NULL


def draw(results: dict[str, dict[str, Any]], *, prompt_tokens: int) -> Any:
    """One pair of bars a model, in thousands of tokens a second; the ratio stands above."""
    matplotlib.rcParams.update({"svg.hashsalt": "0", "font.size": 9})
    figure, axes = plt.subplots(figsize=(6.4, 2.8))
    plain = [result["plain_tokens_per_s"] / 1e3 for result in results.values()]
    patched = [result["sinks"][NULL]["tokens_per_s"] / 1e3 for result in results.values()]
    places = range(len(results))
    axes.bar([x - 0.2 for x in places], plain, 0.38, label="plain server", color="#9aa5b1")
    axes.bar([x + 0.2 for x in places], patched, 0.38, label="with every state dumped")
    for x, result, height in zip(places, results.values(), patched, strict=True):
        sink = result["sinks"][NULL]
        axes.annotate(
            f"{sink['ratio_median']:.3f}\n{sink['gigabytes_per_s']:.1f} GB/s",
            (x + 0.2, height),
            ha="center",
            va="bottom",
        )
    axes.set_xticks(list(places), list(results))
    axes.set_ylabel("prefill, thousand tokens/s")
    axes.set_ylim(0, 1.25 * max(plain))
    axes.set_title(f"{prompt_tokens:,}-token prompts, one H200", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    figure.tight_layout()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("target", type=Path)
    parser.add_argument("results", nargs="+", metavar="NAME=RESULTS.json")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    options = parser.parse_args()
    results = {}
    for name, _, path in (argument.partition("=") for argument in options.results):
        (results[name],) = (
            result
            for result in json.loads(Path(path).read_bytes())
            if result["prompt_tokens"] == options.prompt_tokens
        )
    figure = draw(results, prompt_tokens=options.prompt_tokens)
    figure.savefig(options.target, metadata={"Date": None})


if __name__ == "__main__":
    main()

"""Draws the README's plots from results of prefill_overhead.py: what dumping costs, and the client.

    cd benchmarks/results/2026-11-29-1xH200
    PYTHONPATH=../../.. python -m benchmarks.plot prefill ../../../docs/prefill_overhead.svg \\
        Llama-8B=llama-8b.json Llama-1B=llama-1b.json 'DeepSeek-V3 (12 layers)=deepseek-v3.json'
    cd ../2026-11-30-1xH200
    PYTHONPATH=../../.. python -m benchmarks.plot client ../../../docs/client.svg \\
        Llama-8B=llama-8b-client.json Llama-8B=llama-8b-disk.json \\
        Llama-1B=llama-1b-client.json Llama-1B=llama-1b-disk.json \\
        'DeepSeek-V3 (12 layers)=deepseek-v3-client.json' \\
        'DeepSeek-V3 (12 layers)=deepseek-v3-shm.json'

Of a model named several times, a sink is shown as the last of its results has it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.command import Failed, command_parser, run_command
from benchmarks.prefill_overhead import NULL

Results = Mapping[str, Mapping[str, Any]]  # by model, each of one prompt length

#: The sinks of the second plot, as `--sink` named them, with what they are called there.
CLIENT_SINKS = {NULL: "dumps removed unread", "shm": "shards on /dev/shm", "disk": "shards on disk"}
GREY, BLUE, DARK = "#9aa5b1", "#1f77b4", "#0b3c5d"
TITLE = "{:,}-token prompts, one H200"


def draw_prefill(results: Results, *, prompt_tokens: int) -> Any:
    """A pair of bars for each model, in thousands of tokens a second; the ratio stands above."""
    figure, axes = _axes(results)
    plain = [result["plain_tokens_per_s"] / 1e3 for result in results.values()]
    patched = [result["sinks"][NULL]["tokens_per_s"] / 1e3 for result in results.values()]
    places = range(len(results))
    axes.bar([x - 0.2 for x in places], plain, 0.38, label="plain server", color=GREY)
    axes.bar([x + 0.2 for x in places], patched, 0.38, label="with every state dumped", color=BLUE)
    for x, result, height in zip(places, results.values(), patched, strict=True):
        sink = result["sinks"][NULL]
        _annotate(axes, x + 0.2, height, f"{sink['ratio_median']:.3f}", sink)
    axes.set_ylabel("prefill, thousand tokens/s")
    axes.set_ylim(0, 1.25 * max(plain))
    axes.set_title(TITLE.format(prompt_tokens), loc="left")
    axes.legend(frameon=False, loc="upper left")
    figure.tight_layout()
    return figure


def draw_client(results: Results, *, prompt_tokens: int) -> Any:
    """A bar for each model and sink: speed over that of the plain server, 1 at best."""
    figure, axes = _axes(results)
    for number, (name, label) in enumerate(CLIENT_SINKS.items()):
        measured = [
            (place + 0.28 * (number - 1), result["sinks"][name])
            for place, result in enumerate(results.values())
            if name in result["sinks"]
        ]
        axes.bar(
            [x for x, _ in measured],
            [sink["ratio_median"] for _, sink in measured],
            0.26,
            label=label,
            color=(GREY, BLUE, DARK)[number],
        )
        for x, sink in measured:
            _annotate(axes, x, sink["ratio_median"], f"{sink['ratio_median']:.2f}", sink, size=6.5)
    axes.axhline(1, color="black", linewidth=0.6, linestyle=":", zorder=0)
    axes.set_ylabel("tokens/s over plain prefill")
    axes.set_ylim(0, 1.5)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.set_title(TITLE.format(prompt_tokens), loc="left")
    axes.legend(frameon=False, loc="upper left", ncols=3)
    figure.tight_layout()
    return figure


def _axes(results: Results) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    # A fixed salt: the same results give the same file.
    matplotlib.rcParams.update({"svg.hashsalt": "0", "font.size": 9})
    figure, axes = plt.subplots(figsize=(6.4, 2.8))
    axes.set_xticks(list(range(len(results))), list(results))
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _annotate(
    axes: Any, x: float, height: float, ratio: str, sink: Mapping[str, Any], **style: object
) -> None:
    text = f"{ratio}\n{sink['gigabytes_per_s']:.1f} GB/s"
    axes.annotate(text, (x, height), ha="center", va="bottom", **style)


def result_of(path: Path, prompt_tokens: int) -> Mapping[str, Any]:
    """What was measured with prompts of that length. Raises Failed where the file has none."""
    try:
        measured = {result["prompt_tokens"]: result for result in json.loads(path.read_bytes())}
    except (ValueError, TypeError, KeyError):
        raise Failed(f"{path} is no result of benchmarks.prefill_overhead") from None
    if prompt_tokens not in measured:
        raise Failed(f"{path}: no prompts of {prompt_tokens} tokens, only of {sorted(measured)}")
    result: Mapping[str, Any] = measured[prompt_tokens]
    return result


def main() -> None:
    parser = command_parser(__doc__, __file__)
    parser.add_argument("plot", choices=["prefill", "client"], help="which of the two")
    parser.add_argument("target", metavar="TARGET.svg", type=Path, help="where it is drawn")
    parser.add_argument(
        "results", nargs="+", metavar="NAME=RESULTS.json", help="of --json, by model"
    )
    parser.add_argument("--prompt-tokens", type=int, default=2048, help="of these results")
    options = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    for name, _, path in (argument.partition("=") for argument in options.results):
        if not path:
            parser.error(f"{name}: NAME=RESULTS.json is what is needed")
        result = result_of(Path(path), options.prompt_tokens)
        sinks = results.get(name, {}).get("sinks", {})
        results[name] = {**result, "sinks": {**sinks, **result["sinks"]}}
    draw = draw_client if options.plot == "client" else draw_prefill
    figure = draw(results, prompt_tokens=options.prompt_tokens)
    figure.savefig(options.target, metadata={"Date": None})


if __name__ == "__main__":
    run_command(main)

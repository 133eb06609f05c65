"""Tokens/s of reading, rendering, tokenising and masking prompts, over the bare tokenizer's.

    python -m benchmarks.prompts_speed TOKENIZER [--rows 4000] [--workers 2] [--rounds 3]

Both sides use the same number of processes and the same prompts, in interleaved rounds of one run:
the bare side gets texts that were rendered before and returns token ids; ours gets the rows of a
JSONL file and returns prompts in order. Prints each round, and the ratio of the medians: of the
wall clock, and of the processor time of all processes, this one included, which a busy machine
disturbs less.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import psutil

from benchmarks.command import command_parser, number_from, run_command
from prompts.inputs import scan_inputs
from prompts.pool import RendererPool
from prompts.reading_options import DEFAULTS
from prompts.render import Renderer
from prompts.stream import raw_rows
from prompts.types import Prompt

BATCH_TEXTS = 64
WORDS = Path(__file__).parents[1].joinpath("README.md").read_text().split()

_tokenizer: Any = None


def load_bare(path: str) -> None:
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from transformers import AutoTokenizer

    _tokenizer = AutoTokenizer.from_pretrained(path)


def encode_bare(texts: list[str]) -> list[list[int]]:
    backend = _tokenizer.backend_tokenizer
    return [backend.encode(text, add_special_tokens=False).ids for text in texts]


def write_rows(path: Path, count: int, *, seed: int = 0) -> None:
    """Conversations of two to eight turns, as long as those of ShareGPT and UltraChat."""
    chance = random.Random(seed)

    def text(shortest: int, longest: int) -> str:
        return " ".join(chance.choices(WORDS, k=chance.randint(shortest, longest)))

    with path.open("wb") as file:
        for number in range(count):
            turns = []
            for _ in range(chance.randint(1, 4)):
                turns.append({"role": "user", "content": text(10, 60)})
                turns.append({"role": "assistant", "content": text(40, 220)})
            file.write(orjson.dumps({"id": number, "messages": turns}) + b"\n")


def rendered(renderer: Renderer, path: Path) -> list[str]:
    assert renderer.tokenizer is not None
    texts = []
    for row in raw_rows(scan_inputs([path]), DEFAULTS):
        prompt = renderer.prompt_from(row)
        assert isinstance(prompt, Prompt), prompt
        texts.append(renderer.tokenizer.decode(prompt.input_ids.tolist()))
    return texts


def batches(texts: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(texts), BATCH_TEXTS):
        yield texts[start : start + BATCH_TEXTS]


def cpu_seconds() -> float:
    this = psutil.Process()
    return sum(sum(one.cpu_times()[:2]) for one in (this, *this.children()))


def speeds(work: Callable[[], int]) -> tuple[float, float]:
    """Tokens per second, and per second of processor time."""
    started, cpu = time.perf_counter(), cpu_seconds()
    tokens = work()
    return tokens / (time.perf_counter() - started), tokens / (cpu_seconds() - cpu)


def told(bare: float, bare_cpu: float, ours: float, ours_cpu: float) -> str:
    return (
        f"bare {bare:,.0f} tok/s, prompts {ours:,.0f} tok/s, ratio {ours / bare:.3f} "
        f"(by processor time {ours_cpu / bare_cpu:.3f})"
    )


def main() -> None:
    parser = command_parser(__doc__, __file__)
    parser.add_argument(
        "tokenizer", metavar="TOKENIZER", help="a folder with tokenizer and chat template"
    )
    parser.add_argument("--rows", type=number_from(1), default=4000, help="of the prompt file")
    parser.add_argument("--workers", type=number_from(1), default=2, help="processes of each side")
    parser.add_argument("--rounds", type=number_from(1), default=3, help="of each side")
    arguments = parser.parse_args()

    with (
        tempfile.TemporaryDirectory() as folder,
        RendererPool(arguments.tokenizer) as pool,
        ProcessPoolExecutor(
            arguments.workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=load_bare,
            initargs=(arguments.tokenizer,),
        ) as bare,
    ):
        path = Path(folder, "prompts.jsonl")
        write_rows(path, arguments.rows)
        texts = rendered(Renderer.load(arguments.tokenizer), path)

        def ours() -> int:
            rows = raw_rows(scan_inputs([path]), DEFAULTS)
            tokens = 0
            for prompt in pool.prompts_from(rows, num_workers=arguments.workers):
                assert isinstance(prompt, Prompt), prompt
                tokens += prompt.num_tokens
            return tokens

        def theirs() -> int:
            return sum(len(ids) for part in bare.map(encode_bare, batches(texts)) for ids in part)

        ours(), theirs()  # the processes start
        rounds = []
        for number in range(arguments.rounds):
            rounds.append((*speeds(theirs), *speeds(ours)))
            print(f"round {number + 1}: {told(*rounds[-1])}", flush=True)
        medians = [statistics.median(values) for values in zip(*rounds, strict=True)]
        print(f"{arguments.workers} processes, {arguments.rows} rows, medians: {told(*medians)}")


if __name__ == "__main__":
    run_command(main)

"""The two other ways to a model's hidden states, for comparison: the engine's own JSON route
(`return_hidden_states`), and Hugging Face transformers with saving.

    python -m benchmarks.rivals json URL --model DIR        # server: --enable-return-hidden-states
    python -m benchmarks.rivals huggingface --model DIR --batch 8

Prompts are random tokens; the Hugging Face model has random weights of DIR's config. Each prints
one line of JSON with its tokens/s.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson

from benchmarks.command import Failed, command_parser, directory, number_from, run_command
from benchmarks.load import random_prompts


async def json_route(
    url: str, *, count: int, prompt_tokens: int, concurrency: int, vocab_size: int
) -> dict[str, Any]:
    """Ask for the states of the last layer (the route gives no others) and parse them.

    Raises Failed when a request fails, or an answer does not hold one row per token.
    """
    prompts = random_prompts(
        count + 1,
        num_tokens=prompt_tokens,
        vocab_size=vocab_size,
        generator=np.random.default_rng(0),
    )
    slots = asyncio.Semaphore(concurrency)
    num_bytes = 0
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:

        async def ask(input_ids: list[int]) -> None:
            nonlocal num_bytes
            body = {
                "input_ids": input_ids,
                "sampling_params": {"max_new_tokens": 1, "temperature": 0},
                "return_hidden_states": True,
            }
            try:
                async with slots, session.post(f"{url}/generate", json=body) as response:
                    data = await response.read()
            except aiohttp.ClientError as error:
                raise Failed(f"{url}: {error}") from error
            if response.status != 200:
                raise Failed(
                    f"{url}: HTTP {response.status}: {data[:200].decode(errors='replace')}"
                )
            num_bytes += len(data)
            states = orjson.loads(data)["meta_info"]["hidden_states"]
            rows = len(states[0]) if isinstance(states[0][0], list) else len(states)
            if rows < prompt_tokens:
                raise Failed(
                    f"{rows} rows came for {prompt_tokens} tokens: the route gives those of the "
                    "last chunk alone, so the server's --chunked-prefill-size must be larger"
                )

        await ask(prompts[0].input_ids.tolist())  # warm-up
        num_bytes = 0
        begun = time.perf_counter()
        await asyncio.gather(*(ask(prompt.input_ids.tolist()) for prompt in prompts[1:]))
        seconds = time.perf_counter() - begun
    return {
        "route": "json",
        "layers": 1,
        "prompts": count,
        "tokens_per_s": count * prompt_tokens / seconds,
        "bytes_per_token": num_bytes / (count * prompt_tokens),
    }


def huggingface(
    model_directory: str, *, count: int, prompt_tokens: int, batch: int, layers: int, target: Path
) -> dict[str, Any]:
    """Forward `batch` prompts at a time, keep `layers` states and the last, save each prompt's."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = AutoConfig.from_pretrained(model_directory)
    with torch.device(device):
        model = AutoModel.from_config(config, dtype=torch.bfloat16).eval()
    kept = [2, config.num_hidden_layers // 2, config.num_hidden_layers - 3][:layers]
    ids = torch.randint(3, config.vocab_size, (count, prompt_tokens))

    def extract(rows: torch.Tensor, first: int) -> None:
        with torch.inference_mode():
            states = model(rows.to(device), output_hidden_states=True, use_cache=False)
        aux = torch.cat([states.hidden_states[index] for index in kept], dim=-1).cpu()
        last = states.last_hidden_state.cpu()
        for number in range(len(rows)):
            path = target / f"{first + number}.safetensors"
            save_file({"aux": aux[number].clone(), "last": last[number].clone()}, path)

    extract(ids[:batch], 0)  # warm-up
    begun = time.perf_counter()
    for first in range(0, count, batch):
        extract(ids[first : first + batch], first)
    seconds = time.perf_counter() - begun
    return {
        "route": "huggingface",
        "layers": layers + 1,
        "batch": batch,
        "prompts": count,
        "tokens_per_s": count * prompt_tokens / seconds,
    }


def main() -> None:
    parser = command_parser(__doc__, __file__)
    commands = parser.add_subparsers(dest="command", required=True, help="which way")
    style = parser.formatter_class
    json_parser = commands.add_parser("json", help="the engine's JSON route", formatter_class=style)
    json_parser.add_argument(
        "url", metavar="URL", help="of a server with --enable-return-hidden-states"
    )
    json_parser.add_argument(
        "--concurrency", type=number_from(1), default=8, help="requests at once"
    )
    hf_parser = commands.add_parser(
        "huggingface", help="transformers, saving to /dev/shm", formatter_class=style
    )
    hf_parser.add_argument("--batch", type=number_from(1), default=8, help="prompts in a forward")
    hf_parser.add_argument(
        "--layers", type=int, choices=range(4), default=3, help="kept beside the last"
    )
    for each in (json_parser, hf_parser):
        each.add_argument(
            "--model", type=directory, required=True, help="a folder with a config.json"
        )
        each.add_argument("--count", type=number_from(1), default=16, help="prompts in all")
        each.add_argument("--prompt-tokens", type=number_from(1), default=2048, help="of each")
    options = parser.parse_args()
    if options.command == "json":
        config = json.loads((Path(options.model) / "config.json").read_bytes())
        result = asyncio.run(
            json_route(
                options.url,
                count=options.count,
                prompt_tokens=options.prompt_tokens,
                concurrency=options.concurrency,
                vocab_size=config["vocab_size"],
            )
        )
    else:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as target:
            result = huggingface(
                options.model,
                count=options.count,
                prompt_tokens=options.prompt_tokens,
                batch=options.batch,
                layers=options.layers,
                target=Path(target),
            )
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    run_command(main)

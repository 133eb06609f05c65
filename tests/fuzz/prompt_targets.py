"""Prompt files of every format, as a run reads them: found, sniffed, counted, read, tokenised."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson
import prompt_files
import zstandard
from templates import QWEN3, tokenizer_for

from fuzz.mutation import KINDS, mutated_bytes, mutated_json, put, remove
from fuzz.target import Run, Target
from prompts.inputs import scan_inputs
from prompts.paths import find_files
from prompts.render import Renderer
from prompts.sniff import require_rows
from prompts.stream import raw_rows
from prompts.token_bound import TokenBound

IDS: list[dict[str, Any]] = [
    {"id": f"row-{n}", "input_ids": [n, 2, 3], "loss_mask": [0, 1, 1]} for n in range(5)
]
CHATS: list[dict[str, Any]] = [
    {
        "id": n,
        "messages": [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "hi", "reasoning_content": "well"},
        ],
    }
    for n in range(3)
]
#: Fields by which rows say more: tools, calls, training, parts.
RICH: dict[str, Any] = {
    "id": "rich",
    "conversations": [
        {"from": "system", "value": "be nice"},
        {"from": "human", "value": "what is the weather?", "weight": 0},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "let me see"}],
            "tool_calls": [
                {"id": "1", "type": "function",
                 "function": {"name": "weather", "arguments": '{"where": "here"}'}}
            ],
        },
        {"role": "tool", "content": "fine", "tool_call_id": "1", "name": "weather"},
        {"from": "gpt", "value": "<think>so</think>fine", "train": True},
    ],
    "tools": [
        {"type": "function",
         "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    ],
}  # fmt: skip
DIALECTS: list[dict[str, Any]] = [
    RICH,
    {"prompt": "what?", "response": "that", "system": "s", "history": [["a", "b"]]},
    {"instruction": "do", "input": "this", "output": "done"},
    {"text": "thanks"},
    {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant",
     "content": "b"}], "chat_template_kwargs": {"enable_thinking": False}},
    {"chosen": CHATS[0]["messages"], "rejected": CHATS[0]["messages"]},
]  # fmt: skip
Encode = Callable[[list[dict[str, Any]]], bytes]


def _renderer() -> Renderer:
    return Renderer(tokenizer_for(QWEN3), bound=TokenBound(max_tokens=4000))


def _read(words: Sequence[Path], renderer: Renderer) -> None:
    """What `extractor run` does with files before it sends anything."""
    found = find_files(words)
    for path in found:
        require_rows(path)
    for row in raw_rows(scan_inputs(found), renderer.options):
        renderer.prompt_from(row)


def _place(path: Path, data: bytes, chance: random.Random) -> None:
    remove(path)
    if chance.random() < 0.02:
        put(path, chance.choice([kind for kind in KINDS if kind != "large"]))
    else:
        path.write_bytes(data)


def of_format(*encodings: Encode) -> Callable[[Path], Run]:
    def prepare(directory: Path) -> Run:
        renderer = _renderer()
        sound = [encode(rows) for encode in encodings for rows in (IDS, CHATS)]
        path = directory / "prompts"

        def run(chance: random.Random) -> None:
            _place(path, mutated_bytes(chance.choice(sound), chance, sound), chance)
            _read([path], renderer)

        return run

    return prepare


def prepare_rows(directory: Path) -> Run:
    """Rows whose JSON has another structure, as a line, an array or a Parquet file has them."""
    renderer = _renderer()
    sound = [orjson.dumps(row) for row in (*DIALECTS, *DIALECTS, IDS[0], CHATS[0])]
    path = directory / "prompts"

    def run(chance: random.Random) -> None:
        rows = [mutated_json(row, chance) for row in chance.choices(sound, k=2)]
        if chance.random() < 0.5:
            data = b"\n".join([*rows, sound[-1]])
        else:
            data = b"[" + b",".join([*rows, sound[-1]]) + b"]"
        _place(path, data, chance)
        _read([path], renderer)

    return run


def prepare_saved(directory: Path) -> Run:
    """A folder of Hugging Face's `save_to_disk`."""
    renderer = _renderer()
    folder = directory / "saved"
    folder.mkdir()
    (folder / "data-00000-of-00001.arrow").write_bytes(prompt_files.as_arrow_stream(IDS))
    state: dict[str, Any] = {
        "_data_files": [{"filename": "data-00000-of-00001.arrow"}],
        "_fingerprint": "0123456789abcdef",
        "_format_columns": ["input_ids"],
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": "train",
        "_indices_files": None,
    }
    sound = {
        folder / "state.json": orjson.dumps(state),
        folder / "dataset_dict.json": orjson.dumps({"splits": ["train", "test"]}),
    }
    secret = directory / "secret.jsonl"
    secret.write_bytes(prompt_files.as_jsonl(IDS))

    def run(chance: random.Random) -> None:
        for path in sound:
            remove(path)
        path = chance.choices(list(sound), [4, 1])[0]
        change = mutated_json if chance.random() < 0.8 else mutated_bytes
        data = change(sound[path], chance)
        if chance.random() < 0.05:
            data = data.replace(b"data-00000-of-00001.arrow", b"../secret.jsonl")
        _place(path, data, chance)
        inside = folder.resolve()
        for name in find_files([folder]):
            assert Path(name).resolve().parent == inside, f"{name} is outside"
        _read([folder], renderer)

    return run


def _gzipped(encode: Encode) -> Encode:
    return lambda rows: gzip.compress(encode(rows), mtime=0)


def _zstd(encode: Encode) -> Encode:
    return lambda rows: zstandard.ZstdCompressor().compress(encode(rows))


PACKED = (prompt_files.as_jsonl, prompt_files.as_parquet)

TARGETS = [
    Target(name="rows", count=1500, prepare=prepare_rows),
    Target(name="jsonl", count=500, prepare=of_format(prompt_files.as_jsonl)),
    Target(
        name="array",
        count=500,
        prepare=of_format(prompt_files.as_array, prompt_files.as_pretty_array),
    ),
    Target(name="gzip", count=400, prepare=of_format(*map(_gzipped, PACKED))),
    Target(name="zstd", count=400, prepare=of_format(*map(_zstd, PACKED))),
]

"""Prompt files of every kind through the command, a server and verify."""

from __future__ import annotations

import gzip
import io
import json
import re
import signal
from pathlib import Path
from typing import Any

import orjson
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from helpers import read_samples, rows_of
from templates import QWEN3, tokenizer_for

from acceptance.tool import Fake, Server, Tool, wait_until
from manifest.states import State
from prompts.inputs import RawRow
from prompts.reading_options import ReadingOptions, Thinking
from prompts.render import Renderer
from prompts.types import Prompt, RowOrigin

pytestmark = pytest.mark.slow

USER = {"role": "user", "content": "hello there"}
CALL = {"id": "c1", "type": "function", "function": {"name": "w", "arguments": '{"city": "X"}'}}
TOOL = {"type": "function", "function": {"name": "w", "parameters": {"type": "object"}}}

TOOL_CALLS = [
    {
        "uuid": f"u-{n}",
        "reasoning": "off",
        "tools": orjson.dumps([TOOL]).decode(),
        "messages": [
            {**USER, "tool_calls": None},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": f"rain {n}", "tool_calls": None},
            {"role": "assistant", "content": "rain", "tool_calls": None},
        ],
    }
    for n in range(4)
]
SHAREGPT = [
    {"conversations": [{"from": "human", "value": f"q{n}"}, {"from": "gpt", "value": "a"}]}
    for n in range(4)
]
MIXED: list[dict[str, Any]] = [
    {"messages": [USER, {"role": "assistant", "content": "4", "reasoning_content": "add"}]},
    {"instruction": "hello", "output": "fine"},
    {"id": "bad", "conversations": [{"from": "narrator", "value": "x"}]},
    {"messages": [USER, {"role": "assistant", "content": "long " * 700}]},
    {"data": ["hello", "fine", "thanks"]},
    {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
]
ARROW = [{"text": "<|im_start|>user\nhello<|im_end|>\n"}, {"text": "weather"}]
ROWS: list[dict[str, Any]] = [*TOOL_CALLS, *SHAREGPT, *MIXED, *ARROW]
BAD, LONG = 10, 11


@pytest.fixture
def files(tmp_path: Path) -> list[object]:
    """A gzipped Parquet file, a JSON array, zstd JSONL and a directory of a Hugging Face data set;
    no name tells what is in it."""
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(TOOL_CALLS), sink, row_group_size=3)
    (tmp_path / "tools").write_bytes(gzip.compress(sink.getvalue()))
    (tmp_path / "sharegpt.txt").write_text(json.dumps(SHAREGPT, indent=1))
    lines = b"".join(orjson.dumps(row) + b"\n" for row in MIXED)
    (tmp_path / "mixed.bin").write_bytes(zstandard.compress(lines))
    folder = tmp_path / "dataset"
    folder.mkdir()
    table = pa.Table.from_pylist(ARROW)
    with pa.ipc.new_stream(folder / "data-00000-of-00001.arrow", table.schema) as writer:
        writer.write_table(table)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
    (folder / "state.json").write_text(json.dumps(state))
    return [tmp_path / "tools", tmp_path / "shar*.txt", tmp_path / "mixed.bin", folder]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    tokenizer_for(QWEN3).save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def arguments(
    files: list[object], server: Server, out: Path, tokenizer: Path, *more: object
) -> list[object]:
    return [
        "run", *files, "--out", out, "--server", server.url, "--dump-dir", server.root,
        "--tokenizer", tokenizer, *more,
    ]  # fmt: skip


@pytest.mark.timeout(240)
def test_files_of_every_kind_become_verified_samples(
    tool: Tool, server: Server, files: list[object], tokenizer: Path
) -> None:
    out = tool.cwd / "out"
    options = ("--on-too-long", "truncate", "--max-tokens", 300)
    command = arguments(files, server, out, tokenizer, *options)

    forecast = tool(*command, "--dry-run", "--json")
    assert forecast.returncode == 0, forecast.stderr
    told = forecast.json()
    assert not out.exists()
    assert told["tokens_per_s"] > 0 and told["eta_s"] >= 0

    done = tool(*command, "--tokenizer-workers", 1, "--json")
    assert done.returncode == 1, done.stderr  # one row is bad
    summary = done.json()
    assert summary["failed"] == {"unknown_role": 1}
    assert summary["altered"] == {"arguments_parsed": 4, "no_control_token": 1, "truncated": 1}
    for name in ("failed", "altered", "untrained", "tokens"):
        assert told[name] == summary[name], name
    assert told["bytes"] >= summary["bytes"]
    assert tool("verify", out).returncode == 0

    renderer = Renderer.load(str(tokenizer))
    samples = read_samples(out)
    assert sorted(samples) == [n for n in range(len(ROWS)) if n != BAD]
    for ordinal, sample in samples.items():
        data = orjson.dumps(ROWS[ordinal])
        row = RawRow(ordinal=ordinal, origin=RowOrigin(source="x", line=1), data=data)
        prompt = renderer.prompt_from(row)
        assert isinstance(prompt, Prompt)
        if ordinal == LONG:
            whole = prompt.num_tokens
            prompt = prompt.cut(300)
        assert sample.ids == tuple(prompt.input_ids.tolist()), ordinal
        assert sample.mask == tuple(prompt.loss_mask.tolist()), ordinal

    rows = rows_of(out)
    assert [row.ordinal for row in rows if row.state is State.FAILED] == [BAD]
    cut = rows[LONG].prompt
    assert cut is not None and cut.alterations == ("truncated",)
    # Only as much was tokenised as the cut needs.
    said = re.fullmatch(r"cut from more than (\d+) tokens", rows[LONG].detail or "")
    assert said is not None and 300 < int(said[1]) < whole
    assert "narrator" in (rows[BAD].detail or "")

    again = tool(*command, "--json")
    assert again.json()["session"]["sent"] == 0
    other = tool(*arguments(files, server, out, tokenizer), "--json")
    assert other.returncode == 2
    assert "--on-too-long: out has 'truncate', this run has 'skip'" in other.stderr.replace(
        str(out), "out"
    )


@pytest.mark.timeout(120)
def test_standard_input_is_resumed_with_and_without_it(
    tool: Tool, server: Server, tokenizer: Path
) -> None:
    out = tool.cwd / "out"
    thought = {"role": "assistant", "content": "4", "reasoning_content": "add"}
    row = {"messages": [USER, thought, USER, {**thought, "content": "9"}]}
    data = orjson.dumps(row).decode() + "\n"
    command = arguments(["-"], server, out, tokenizer, "--thinking", "expand", "--json")
    first = tool(*command, stdin=data)
    assert first.returncode == 0, first.stderr
    assert first.json()["rows"]["stored"] == 2
    for stdin in (data, ""):
        again = tool(*command, stdin=stdin)
        assert (again.returncode, again.json()["session"]["sent"]) == (0, 0), again.stderr
    other = tool(*command, stdin=data * 2)
    assert (other.returncode, "standard input is not what" in other.stderr) == (2, True)
    assert tool("verify", out).returncode == 0

    renderer = Renderer.load(str(tokenizer), ReadingOptions(thinking=Thinking.EXPAND))
    for part, sample in read_samples(out).items():
        prompt = renderer.prompt_from(
            RawRow(
                ordinal=part,
                origin=RowOrigin(source="-", line=1, part=part),
                data=data.encode(),
            )
        )
        assert isinstance(prompt, Prompt)
        assert sample.mask == tuple(prompt.loss_mask.tolist())
    assert [row.origin.part for row in rows_of(out)] == [0, 1]


@pytest.mark.crash
@pytest.mark.timeout(400)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_tokenises_in_processes_is_stopped_and_goes_on(
    tool: Tool, fake: Fake, tokenizer: Path, number: signal.Signals
) -> None:
    num_rows, out = 1500, tool.cwd / "out"
    prompts = tool.cwd / "p.jsonl"
    with prompts.open("wb") as file:
        for row in range(num_rows):
            turns = [USER, {"role": "assistant", "content": "fine " * (row % 9 + 1)}]
            file.write(orjson.dumps({"id": row, "messages": turns}) + b"\n")
    command = arguments(
        [prompts], fake, out, tokenizer, "--tokenizer-workers", 2, "--concurrency", 8
    )
    process = tool.start(*command)
    wait_until(lambda: fake.requests() > 100, what="the first prompts")
    processes = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    process.communicate(timeout=120)
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert (process.returncode, alive) == (130 if number == signal.SIGINT else -9, [])
    sent = fake.requests()
    assert sent < num_rows
    again = tool(*command, "--json")
    assert again.json()["rows"]["stored"] == num_rows, again.stderr
    # What was in flight is sent again, what was stored is not; two are probes.
    in_flight = 2 * 8 if number == signal.SIGKILL else 0
    assert fake.requests() <= num_rows + 2 + in_flight
    assert tool("verify", out).returncode == 0

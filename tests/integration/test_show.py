"""`extractor show` and `extractor run --dry-run`, without a server."""

from __future__ import annotations

import json
from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner, Result
from helpers import make_prompts, write_prompts
from templates import QWEN3, tokenizer_for

from extractor.cli.main import cli
from extractor.core.errors import UsageError
from extractor.shards.format import header_room, sample_bytes
from prompts.types import InputError
from server_patch.dump_format import StateLayout

ROWS = [
    {"id": "a", "messages": [{"role": "user", "content": "hello"}]},
    {
        "id": "b",
        "messages": [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "4", "reasoning_content": "add"},
            {"role": "user", "content": "3*3?"},
            {"role": "assistant", "content": "9", "reasoning_content": "mul"},
        ],
    },
    {"id": "c", "messages": [{"role": "narrator", "content": "x"}]},
]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in ROWS))
    return path


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    tokenizer_for(QWEN3).save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def invoke(*words: object, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words], input=stdin)


def test_show_prints_the_rendering_with_the_trained_tokens_marked(
    prompts: Path, tokenizer: Path
) -> None:
    shown = invoke("show", prompts, "--row", 1, "--tokenizer", tokenizer)
    assert shown.exit_code == 0, shown.output
    assert shown.output == (
        "row      1 of 3\n"
        f"where    {prompts}:2\n"
        'label    "b"\n'
        "tokens   39, of these trained 13\n"
        "changed  thinking_hidden\n"
        "\n"
        "<|im_start|>user\n2+2?<|im_end|>\n"
        "<|im_start|>assistant\n⟦4<|im_end|>⟧\n"
        "<|im_start|>user\n3*3?<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\nmul\n</think>\n\n9<|im_end|>⟧\n"
        "\n"
        "\n"
        "tokens    count  trained\n"
        "[0, 12)      12       no\n"
        "[12, 14)      2      yes\n"
        "[14, 27)     13       no\n"
        "[27, 38)     11      yes\n"
        "[38, 39)      1       no\n"
    )


def test_show_as_json_holds_everything_and_adds_up(prompts: Path, tokenizer: Path) -> None:
    shown = invoke(
        "show", prompts, "--row", 2, "--tokenizer", tokenizer, "--thinking", "expand", "--json"
    )
    document = json.loads(shown.stdout)
    assert (document["row"], document["line"], document["part"]) == (2, 2, 1)
    assert document["tokens"] == len(document["input_ids"]) == len(document["loss_mask"])
    assert document["trained"] == sum(document["loss_mask"])
    assert sum(run["tokens"] for run in document["runs"]) == document["tokens"]
    texts = [run["text"] for run in document["runs"] if run["trained"]]
    assert texts == ["<think>\nmul\n</think>\n\n9<|im_end|>"]


def test_show_tells_why_a_row_gives_no_prompt(prompts: Path, tokenizer: Path) -> None:
    shown = invoke("show", prompts, "--row", 2, "--tokenizer", tokenizer)
    assert "no prompt  unknown_role" in shown.output
    assert shown.exit_code == 1
    mapped = invoke(
        "show", prompts, "--row", 2, "--tokenizer", tokenizer, "--role-map", "narrator=user"
    )
    assert "changed  role_mapped" in mapped.output


def test_show_reads_rows_of_ids_from_standard_input_without_a_tokenizer() -> None:
    data = b'{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}\n'
    shown = invoke("show", "-", "--tokenizer", "none", "--ids", stdin=data)
    assert shown.exit_code == 0
    assert "where   -:1\n" in shown.output
    assert shown.output.endswith(
        "tokens  count  trained\n[0, 1)      1       no\n[1, 3)      2      yes\n\n5\n⟦6 7⟧\n"
    )


def test_a_row_beyond_the_last_is_refused(prompts: Path) -> None:
    shown = invoke("show", prompts, "--row", 3, "--tokenizer", "none")
    assert isinstance(shown.exception, UsageError)
    assert str(shown.exception) == "--row 3: of 3 rows, from 0 on, the last is 2"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--role-map", "x"), "write it as NAME=ROLE"),
        (("--template-kwargs", "{"), "is not JSON"),
        (("--template-kwargs", "[1]"), "a JSON object is needed"),
        (("--chat-template", "/none"), "/none: cannot be read"),
        (("--chat-template", "/dev/zero"), "/dev/zero: cannot be read ([Errno 22] not a regular"),
        (("--chat-template", "/"), "/: cannot be read"),
    ],
)
def test_an_option_that_cannot_be_read_says_how_to_write_it(
    prompts: Path, words: tuple[str, ...], message: str
) -> None:
    shown = invoke("show", prompts, "--tokenizer", "none", *words)
    assert shown.exit_code == 2
    assert f"Invalid value for '{words[0]}': " in shown.output
    assert message in shown.output


NO_SERVER = ("--server", "http://127.0.0.1:9")


def test_a_dry_run_knows_sizes_from_the_model_s_configuration(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    config = {
        "num_hidden_layers": 8,
        "hidden_size": 64,
        "torch_dtype": "bfloat16",
        "vocab_size": 1000,
        "max_position_embeddings": 50,
    }
    (model / "config.json").write_text(json.dumps({"text_config": config}))
    path = write_prompts(tmp_path / "p.jsonl", make_prompts(40, longest=60))
    command = (
        "run", path, "--dry-run", "--json", "--tokenizer", "none", "--model", model,
        "--layers", "1,2", "--last", "both", "--movers", 1, "--out", tmp_path / "out", *NO_SERVER,
    )  # fmt: skip
    done = invoke(*command)
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    fitting = [row for row in make_prompts(40, longest=60) if len(row.ids) < 50]
    layout = StateLayout(boundaries=(1, 2), hidden_size=64, dtype="BF16", last_kind="both")
    assert document["prompts"] == len(fitting)
    assert document["failed"] == {"too_long": 40 - len(fitting)}
    assert document["tokens"] == sum(len(row.ids) for row in fitting)
    assert document["bytes"] == header_room(len(fitting), layout) + sum(
        sample_bytes(len(row.ids), layout) for row in fitting
    )
    assert (document["shards"], document["eta_s"]) == (1, None)
    # Few requests at a time do not mean few prompts: all of these may be on their way.
    of_one = json.loads(invoke(*command, "--concurrency", 1).stdout)
    assert of_one["shm_peak_bytes"] == document["shm_peak_bytes"] > 0
    assert not (tmp_path / "out").exists()


def test_a_dry_run_says_what_it_does_not_know(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "p.jsonl", make_prompts(3))
    done = invoke("run", path, "--dry-run", "--tokenizer", "none", *NO_SERVER)
    assert "Bytes are not known" in done.stdout
    assert "The time is not known: no server answers at http://127.0.0.1:9." in done.stdout
    refused = invoke("run", path, "--dry-run", *NO_SERVER)
    assert isinstance(refused.exception, UsageError)
    assert "Name a --tokenizer" in str(refused.exception)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--chat-template", "{% for"), "cannot be compiled, line 1"),
        (("--chat-template", "{{ x | no_such_filter }}"), "No filter named 'no_such_filter'"),
        (("--chat-template", None), "cannot be read"),
        (("--field", "body"), "--field body: no row has such a column; found: id, messages"),
        (("--ignore-column", "mask"), "--ignore-column mask: no row has such a column or key"),
    ],
)
def test_an_option_that_no_row_can_be_read_with_is_refused_before_anything_is_written(
    prompts: Path, tmp_path: Path, options: tuple[str, str | None], message: str
) -> None:
    name, value = options
    if name == "--chat-template":
        template = tmp_path / "template.jinja"
        if value is not None:
            template.write_text(value)
        value = str(template)
    result = invoke("run", prompts, "--out", tmp_path / "out", name, value)
    assert isinstance(result.exception, SystemExit | UsageError | InputError)
    assert message in f"{result.exception} {result.output}"
    assert not (tmp_path / "out").exists()


def test_standard_input_that_is_refused_is_not_kept(tmp_path: Path) -> None:
    result = invoke("run", "-", "--out", tmp_path / "out", stdin=b"id,text\n1,hello\n")
    assert isinstance(result.exception, InputError)
    assert not (tmp_path / "out" / "stdin").exists()

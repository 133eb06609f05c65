"""Chat templates and tokenizers that hang, crash or eat memory: each costs its row and no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from templates import QWEN3, tokenizer_for
from tokenizers import Regex, pre_tokenizers

from prompts.inputs import RawRow
from prompts.pool import RendererPool, check_template
from prompts.reading_options import ReadingOptions, TemplateOptions
from prompts.types import BadRow, Prompt, RowOrigin, RowReason, TokenizerError
from prompts.worker_messages import CodeLimits

# A process takes seconds to start, on a busy machine many.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
LIMITS = CodeLimits(row_s=2, memory_bytes=512 << 20, max_deaths=5)
#: Does as the first turn says.
TEMPLATE = """
{%- macro deeper(n) %}{{ deeper(n + 1) }}{% endmacro %}
{%- set word = messages[0].content %}
{%- if word == "loop" %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}
{%- endfor %}
{%- elif word == "memory" %}{{ (word * 10**8) | list | length }}
{%- elif word == "range" %}{% for i in range(10**9) %}{% endfor %}
{%- elif word == "recursion" %}{{ deeper(0) }}{% endif %}"""
#: Words that break the tokenizer, in texts; it looks through everything that it is given.
SLOW, PANIC = ("a" * 28 + "\n") * 100_000, "x" * 60
#: A tokenizer's class of its own, as a package may bring it.
OWN_CLASS = """
import os, signal, sys, types

def find_spec(name, path=None, target=None):
    if name == "prompts.render":
        sys.meta_path.remove(finder)
        from prompts.tokenizer import ChatTokenizer
        original = ChatTokenizer.encode

        def encode(self, text):
            match text:
                case "exit":
                    sys.exit("no licence")
                case "quit":
                    os._exit(0)
                case "crash":
                    os.kill(os.getpid(), signal.SIGSEGV)
                case "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "allocate":
                    return bytearray(8 << 30)
                case "abort":
                    os.write(2, b"\\x1b[2Jmemory allocation of 123456 bytes failed\\n")
                    os.abort()
            return original(self, text)

        ChatTokenizer.encode = encode

finder = types.SimpleNamespace(find_spec=find_spec)
sys.meta_path.insert(0, finder)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = tokenizer_for(QWEN3)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"(x+x+)+y"), "isolated"),
            pre_tokenizers.Split(Regex(r"^(([a-z])+.)+[A-Z]([a-z])+$"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def pool(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RendererPool]:
    package = tmp_path_factory.mktemp("package")
    (package / "sitecustomize.py").write_text(OWN_CLASS)
    options = ReadingOptions(template=TemplateOptions(text=TEMPLATE + QWEN3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(package), prepend=os.pathsep)
        with RendererPool(str(folder), options, limits=LIMITS) as pool:
            yield pool


def text(word: str) -> dict[str, object]:
    return {"text": word}


def chat(word: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": word}]}


def raw(rows: Sequence[dict[str, object]]) -> list[RawRow]:
    return [
        RawRow(
            ordinal=number,
            origin=RowOrigin(source="a", line=number + 1),
            data=json.dumps({"id": number, **row}).encode(),
        )
        for number, row in enumerate(rows)
    ]


CODE = "the chat template or the tokenizer"
NO_MEMORY = "chat template: it needs more memory than a worker process may take"
HOSTILE = {
    "loop": (chat("loop"), f"{CODE} took more than 2 s"),
    "memory": (chat("memory"), NO_MEMORY),
    "range": (chat("range"), "chat template: OverflowError: Range too big"),
    "recursion": (chat("recursion"), "chat template: RecursionError: maximum recursion"),
    "slow-native-code": (text(SLOW), f"{CODE} took more than 2 s"),
    "panic": (text(PANIC), f"{CODE} raised PanicException: Onig: Regex search error"),
    "exit": (text("exit"), f"{CODE} raised SystemExit: no licence"),
    "quit": (text("quit"), "its worker process died with exit status 0"),
    "crash": (text("crash"), "its worker process died of SIGSEGV"),
    "killed": (text("killed"), "its worker process was killed (SIGKILL): is memory short?"),
    "allocate": (text("allocate"), f"{CODE} needed more than 0.5 GiB of memory"),
    "abort": (text("abort"), f"{CODE} needed more than 0.5 GiB of memory"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_row_that_breaks_its_worker_is_one_failed_row(pool: RendererPool, name: str) -> None:
    row, detail = HOSTILE[name]
    good = chat("hello")
    before, bad, *after = pool.prompts_from(raw([good, row, good, good]))
    assert isinstance(bad, BadRow), bad
    assert (bad.ordinal, bad.label, bad.reason) == (1, "1", RowReason.RENDER_FAILED)
    assert bad.detail.startswith(detail)
    assert bad.detail.isprintable()
    assert [item.ordinal for item in (before, *after)] == [0, 2, 3]
    assert all(isinstance(item, Prompt) for item in (before, *after))


def test_rows_that_all_break_their_workers_end_the_run_soon(pool: RendererPool) -> None:
    num_read = 0

    def rows() -> Iterator[RawRow]:
        nonlocal num_read
        for row in raw([text("exit")] * 5000):
            num_read += 1
            yield row

    with pytest.raises(TokenizerError, match="5 worker processes died one after the other"):
        list(pool.prompts_from(rows()))
    assert num_read < 500
    assert isinstance(next(iter(pool.prompts_from(raw([chat("hello")])))), Prompt)


def test_a_template_that_cannot_be_checked_is_refused() -> None:
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(TokenizerError, match=r"cannot be checked: .* took more than 3 s"):
        check_template(loop, CodeLimits(load_s=3))


def test_a_tokenizer_that_takes_too_long_to_load_is_one_error(folder: Path) -> None:
    options = ReadingOptions(template=TemplateOptions(text="{{ 'a' * 10**9 }}" * 100 + TEMPLATE))
    with RendererPool(str(folder), options, limits=CodeLimits(load_s=0.05)) as pool:
        with pytest.raises(TokenizerError, match=r"cannot be loaded: .* took more than 0\.05 s"):
            pool.load()


def test_a_tokenizer_too_large_for_memory_is_one_error(tmp_path: Path, folder: Path) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    os.truncate(tmp_path / "tokenizer.json", 8 << 30)  # of zeros, which take no room
    with RendererPool(str(tmp_path), limits=LIMITS) as pool, pytest.raises(TokenizerError):
        pool.load()


def test_a_pipe_among_a_tokenizers_files_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with RendererPool(str(tmp_path)) as pool:
        with pytest.raises(TokenizerError, match=r"tokenizer\.json: not a regular file"):
            pool.load()


def test_the_client_never_imports_what_renders(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"messages": [{"role": "user", "content": "hello"}]}\n')
    script = (
        "import sys\n"
        "from extractor.cli.main import cli\n"
        "cli(sys.argv[1:], standalone_mode=False)\n"
        "assert not {'transformers', 'tokenizers', 'jinja2'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "show", prompts, "--tokenizer", folder],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "hello<|im_end|>" in done.stdout

"""Worker processes: the same prompts, in order, few ahead, and no orphans."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path

import orjson
import psutil
import pytest
from templates import QWEN3, tokenizer_for

from prompts import pool as pools
from prompts.ambient import parse_moment
from prompts.inputs import RawRow
from prompts.pool import RendererPool
from prompts.reading_options import ReadingOptions, TemplateOptions, Train, Training
from prompts.render import Renderer
from prompts.token_bound import TokenBound
from prompts.types import BadRow, Prompt, RowOrigin, RowReason, TokenizerError

# A process takes seconds to start, on a busy machine many.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer_for(QWEN3).save_pretrained(path)
    return str(path)


def rows(num_rows: int) -> Iterator[RawRow]:
    for number in range(num_rows):
        turns = [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": "fine " * (number % 7)},  # some are empty: bad rows
        ]
        data = orjson.dumps({"id": number, "messages": turns})
        yield RawRow(ordinal=number, origin=RowOrigin(source="a", line=number + 1), data=data)


def children() -> set[psutil.Process]:
    """Of this process, but for the one that multiprocessing keeps for itself."""
    found = set()
    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if "resource_tracker" not in " ".join(process.cmdline()):
                found.add(process)
    return found


def facts(item: Prompt | BadRow) -> tuple[object, ...]:
    if isinstance(item, BadRow):
        return (item.ordinal, item.reason, item.detail)
    return (item.ordinal, item.label, item.key, item.num_trained, item.alterations)


def test_the_pool_gives_what_one_renderer_gives_in_the_same_order(folder: str) -> None:
    options = ReadingOptions(training=Training(answers=Train.LAST))
    renderer = Renderer.load(folder, options)
    expected = [facts(renderer.prompt_from(row)) for row in rows(300)]
    with RendererPool(folder, options) as pool:
        assert pool.load().tokenizer_digest == renderer.tokenizer_digest
        assert pool.load().template_digest == renderer.template_digest
        assert [facts(item) for item in pool.prompts_from(rows(300), num_workers=2)] == expected
        again = pool.prompts_from(rows(300))
        assert [facts(next(again)) for _ in range(10)] == expected[:10]
        again.close()  # what it left in the processes is dropped
        assert [facts(item) for item in pool.prompts_from(rows(300))] == expected
    assert {type(reason) for _, reason, *_ in expected} != {str}  # bad rows were among them


def test_only_a_few_batches_are_read_ahead(folder: str) -> None:
    num_read = 0

    def counted() -> Iterator[RawRow]:
        nonlocal num_read
        for row in rows(1000):
            num_read += 1
            yield row

    with RendererPool(folder, batch_rows=4) as pool:
        items = pool.prompts_from(counted())
        for taken in range(1, 9):
            next(items)
            assert num_read <= 4 * (pools.BATCHES_AHEAD + taken // 4 + 1)


def test_a_process_that_is_killed_costs_no_row(folder: str) -> None:
    before = children()
    expected = [facts(item) for item in map(Renderer.load(folder).prompt_from, rows(500))]
    with RendererPool(folder) as pool:
        items = pool.prompts_from(rows(500))
        found = [facts(next(items))]
        (child,) = children() - before
        child.send_signal(signal.SIGKILL)
        assert [*found, *map(facts, items)] == expected


def test_worker_processes_respect_the_token_bound_of_the_run(folder: str) -> None:
    data = orjson.dumps({"text": "one two three " * 10_000})
    row = RawRow(ordinal=0, origin=RowOrigin(source="a", line=1), data=data)
    with RendererPool(folder, bound=TokenBound(max_tokens=1000)) as pool:
        (item,) = pool.prompts_from([row])
    assert isinstance(item, BadRow)
    assert (item.reason, item.detail) == (RowReason.TOO_LONG, "more than 2000 tokens")


def test_ten_megabytes_in_a_row_take_little_more_memory_than_ten_bytes(folder: str) -> None:
    script = (
        "import resource, sys\n"
        "from prompts.token_bound import TokenBound\n"
        "from prompts.inputs import RawRow\n"
        "from prompts.types import RowOrigin\n"
        "from prompts.render import Renderer\n"
        "renderer = Renderer.load(sys.argv[1], bound=TokenBound(max_tokens=8192))\n"
        "content = b'one two three ' * int(sys.argv[2])\n"
        'data = b\'{"messages": [{"role": "user", "content": "%s"}]}\' % content\n'
        "origin = RowOrigin(source='a', line=1)\n"
        "item = renderer.prompt_from(RawRow(ordinal=0, origin=origin, data=data))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10, type(item).__name__)\n"
    )

    def peak_mib(num_words: int) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-c", script, folder, str(num_words)],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            check=True,
        )
        peak, kind = done.stdout.split()
        return int(peak), kind

    (small, _), (large, kind) = peak_mib(1), peak_mib(750_000)
    assert kind == "BadRow"
    assert large - small < 150  # 1,500 if it is tokenised


@pytest.mark.parametrize("change", ["vocabulary", "template"])
def test_worker_processes_refuse_a_tokenizer_that_changed(
    folder: str, tmp_path: Path, change: str
) -> None:
    """The workers load it later than the run, when its files may have been replaced."""
    copy = tmp_path / "tokenizer"
    shutil.copytree(folder, copy)
    with RendererPool(str(copy)) as pool:
        pool.load()
        match change:
            case "vocabulary":
                path = copy / "tokenizer.json"
                state = orjson.loads(path.read_bytes())
                vocabulary = state["model"]["vocab"]
                vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
                path.write_bytes(orjson.dumps(state))
            case "template":
                (copy / "chat_template.jinja").write_text(QWEN3 + "!")
        endless = (row for _ in count() for row in rows(1))
        with pytest.raises(TokenizerError, match="its chat template changed while it was being"):
            for _ in pool.prompts_from(endless, num_workers=2):
                pass


def test_all_worker_processes_give_a_template_the_same_time(tmp_path: Path) -> None:
    template = "{{ strftime_now('%Y-%m-%d %H:%M:%S') }}" + QWEN3
    tokenizer_for(template).save_pretrained(tmp_path)
    moment = parse_moment("1999-12-31T23:59:58+05:30")
    options = ReadingOptions(template=TemplateOptions(now=moment))
    with RendererPool(str(tmp_path), options) as pool:
        assert pool.load().now == moment.isoformat()
        found = [
            item.input_ids
            for item in pool.prompts_from(rows(200), num_workers=2)
            if isinstance(item, Prompt)
        ]
        texts = pool.decode(found)
    assert len(texts) > 100
    for text in texts:
        assert text is not None and text.startswith("1999-12-31 23:59:58<|im_start|>")


def test_a_pool_that_is_closed_ends_its_processes_and_whoever_waits_for_them(folder: str) -> None:
    before = children()
    with ThreadPoolExecutor(1) as thread:
        with RendererPool(folder) as pool:
            endless = (row for _ in count() for row in rows(1))
            items = pool.prompts_from(endless)
            next(items)
            processes = children() - before
            rest = thread.submit(lambda: sum(1 for _ in items))
        assert rest.result(timeout=30) >= 0
        gone, alive = psutil.wait_procs(processes, timeout=30)
        assert (len(gone), alive) == (1, [])


def test_no_process_outlives_a_killed_parent(folder: str, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys\n"
        "from prompts.inputs import RawRow\n"
        "from prompts.types import RowOrigin\n"
        "from prompts.pool import RendererPool\n"
        "def rows():\n"
        "    while True:\n"
        "        origin = RowOrigin(source='a', line=1)\n"
        '        yield RawRow(ordinal=0, origin=origin, data=b\'{"text": "hi"}\')\n'
        "with RendererPool(sys.argv[1]) as pool:\n"
        "    next(pool.prompts_from(rows()))\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, str(script), folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert parent.stdout is not None and parent.stdin is not None
    with parent:
        assert parent.stdout.readline() == b"ready\n"
        orphans = psutil.Process(parent.pid).children(recursive=True)
        assert orphans
        parent.kill()
        gone, alive = psutil.wait_procs(orphans, timeout=30)
        assert (len(gone), alive) == (len(orphans), [])

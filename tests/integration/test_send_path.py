"""The modules that one prompt passes on its way to its committed sample."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from acceptance.tool import fake_server
from helpers import Notes, assert_whole, make_prompts, options_for, run, write_prompts

from extractor.dispatch.prompt_task import PromptTasks
from extractor.shards.sequence import ShardSequence
from extractor.testing.fake_server import FakeServer

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = ("extractor/", "manifest/", "prompts/", "server_patch/")
MAX_STOPS = 20
#: Tasks that run beside the prompts, whatever becomes of them.
BESIDE = {"reporter", "drain", "server-alive", "server-trial", "server-drain", "server-monitor"}
#: What the stops use: values and pure rules, the operating system, the inside of the manifest.
USED = (
    "extractor/core/", "extractor/system/", "manifest/", "prompts/types.py",
    "server_patch/directory.py", "server_patch/dump_format.py", "server_patch/fields.py",
    "extractor/dispatch/limiter.py", "extractor/dispatch/suspects.py", "extractor/shards/format.py",
)  # fmt: skip
#: What brings the prompt to the first stop, and waits for the session's end.
BEFORE = (
    "extractor/intake/prompt_stream.py", "extractor/pipeline/run.py",
    "extractor/dispatch/provenance.py", "extractor/pipeline/open_data_set.py",
    "extractor/dispatch/server.py",
)  # fmt: skip


class Trace:
    """The product's modules whose functions are called while it is on, in any thread."""

    def __init__(self) -> None:
        self.is_on = False
        self.modules: set[str] = set()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        path = frame.f_code.co_filename
        if not self.is_on or event != "call" or not path.startswith(str(ROOT)):
            return
        if threading.current_thread() is threading.main_thread():
            try:
                task = asyncio.current_task()
            except RuntimeError:  # no loop is running
                task = None
            if task is not None and task.get_name() in BESIDE:
                return
        module = path.removeprefix(f"{ROOT}/")
        if module.startswith(PACKAGES):
            self.modules.add(module)


@contextmanager
def tracing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trace]:
    """On from the prompt's start to the end of its shard."""
    trace = Trace()
    start, finish = PromptTasks.start, ShardSequence.finish

    async def on(self: PromptTasks, *arguments: Any, **named: Any) -> None:
        trace.is_on = True
        await start(self, *arguments, **named)

    async def off(self: ShardSequence) -> None:
        trace.is_on = False
        await finish(self)

    monkeypatch.setattr(PromptTasks, "start", on)
    monkeypatch.setattr(ShardSequence, "finish", off)
    before = sys.getprofile()
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        yield trace
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


def stops() -> list[str]:
    """The modules of the page's table, in its order."""
    named = re.findall(r"^\| \d+ \| `([\w/.]+)` \|", PAGE.read_text(), re.MULTILINE)
    return [name if name.startswith("manifest/") else f"extractor/{name}" for name in named]


async def test_one_prompt_passes_the_stops_that_the_architecture_page_lists_and_no_others(
    tmp_path: Path, dump_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = make_prompts(1)
    path = write_prompts(tmp_path / "p.jsonl", prompts)
    with fake_server(dump_root) as fake:
        options = options_for(
            FakeServer(dump_root), path, tmp_path / "out", server_urls=(fake.url,)
        )
        with tracing(monkeypatch) as trace:
            await run(options, Notes())
    assert_whole(tmp_path / "out", prompts)
    assert len(stops()) <= MAX_STOPS
    assert set(stops()) <= trace.modules, "a stop that no prompt passes"
    others = trace.modules - set(stops()) - set(BEFORE)
    assert [module for module in sorted(others) if not module.startswith(USED)] == []

"""A resumed run renders the same prompts as before, or stops."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import (
    Notes,
    changed,
    options_for,
    read_samples,
    rows_of,
    run,
    stored_rows,
)
from templates import QWEN3, tokenizer_for

from extractor.core.errors import ConfigMismatch, Interrupted, exit_code, first_known
from extractor.core.locations import MANIFEST_NAME
from extractor.core.run_options import RunOptions
from extractor.testing.fake_server import FakeServer
from extractor.testing.faults import Fault
from extractor.verify.audit import audit
from manifest.exceptions import PromptChanged
from manifest.store import Store
from prompts import render
from prompts.ambient import parse_moment
from prompts.reading_options import ReadingOptions, TemplateOptions
from prompts.render import Renderer

#: Each run starts a process that tokenises.
pytestmark = pytest.mark.slow

NUM_ROWS = 40
FIRST, LATER = "2026-01-31T23:59:59+01:00", "2026-02-01T08:00:00+09:00"
WITH_CLOCK = "<|im_start|>system\nIt is {{ strftime_now('%d %b %Y %H:%M:%S') }}<|im_end|>\n" + QWEN3


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    tokenizer_for(QWEN3).save_pretrained(tmp_path / "tokenizer")
    path = tmp_path / "p.jsonl"
    with path.open("w") as file:
        for n in range(NUM_ROWS):
            turns = [
                {"role": "user", "content": f"question {n}"},
                {"role": "assistant", "content": "fine"},
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def at(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    monkeypatch.setattr(render, "current_moment", lambda: parse_moment(moment))


def wishes(
    server: FakeServer, prompts: Path, out: Path, *, now: str | None = None, **changes: Any
) -> RunOptions:
    moment = None if now is None else parse_moment(now)
    reading = ReadingOptions(template=TemplateOptions(text=WITH_CLOCK, now=moment))
    return options_for(
        server, prompts, out, tokenizer=str(prompts.parent / "tokenizer"), reading=reading,
        concurrency=1, **changes,
    )  # fmt: skip


def stop_at(number: int) -> Callable[[int, str], Fault | None]:
    def act(count: int, rid: str) -> Fault | None:
        if count == number:
            os.kill(os.getpid(), signal.SIGINT)
        return None

    return act


async def begin(dump_root: Path, prompts: Path, out: Path, notes: Notes, **changes: Any) -> None:
    """Store some of the rows."""
    async with FakeServer(dump_root, faults=stop_at(12)).running() as server:
        with pytest.raises(Interrupted):
            await run(wishes(server, prompts, out, **changes), notes)
    assert 8 <= len(read_samples_open(out)) < NUM_ROWS


def read_samples_open(out: Path) -> list[int]:
    return [row.ordinal for row in rows_of(out) if row.state.value == "stored"]


def times_in(out: Path, tokenizer: str) -> set[str]:
    decode = Renderer.load(tokenizer).tokenizer
    assert decode is not None
    samples = read_samples(out)
    assert len(samples) == NUM_ROWS
    return {decode.decode(sample.ids)[len("<|im_start|>system\nIt is ") :][:20]
            for sample in samples.values()}  # fmt: skip


def stated_time(out: Path) -> str | None:
    document = json.loads((out / "dataset.json").read_text())
    return document["reading"].get("now")  # type: ignore[no-any-return]


def forget_time(out: Path) -> None:
    """Remove the recorded time, as in a data set of an older version."""
    store = Store.create_or_open(out / MANIFEST_NAME)
    reading = store.identity()["reading"]
    del reading["now"]
    store.amend("reading", reading)
    store.close()


async def test_a_data_set_keeps_one_time_over_all_sessions(
    tmp_path: Path, dump_root: Path, prompts: Path, out: Path, notes: Notes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    at(monkeypatch, FIRST)
    await begin(dump_root, prompts, out, notes)
    assert stated_time(out) == FIRST
    at(monkeypatch, LATER)
    async with FakeServer(dump_root).running() as server:
        with pytest.raises(ConfigMismatch, match=rf"\n  --now: .* '{FIRST[:10]}.*'{LATER[:10]}"):
            await run(wishes(server, prompts, out, now=LATER), notes)
        assert server.requests == []
        await run(wishes(server, prompts, out), notes)
        await run(wishes(server, prompts, out, now=FIRST), notes)
    assert times_in(out, str(tmp_path / "tokenizer")) == {"31 Jan 2026 23:59:59"}
    assert stated_time(out) == FIRST
    assert audit(out).findings.all == []


async def test_the_now_option_makes_two_data_sets_equal(
    tmp_path: Path, dump_root: Path, prompts: Path, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = []
    for number, moment in enumerate((FIRST, LATER)):
        at(monkeypatch, moment)
        out = tmp_path / f"out-{number}"
        async with FakeServer(dump_root).running() as server:
            await run(wishes(server, prompts, out, now=FIRST), notes)
        keys.append([row.prompt.key for row in stored_rows(out)])
        assert stated_time(out) == FIRST
    assert keys[0] == keys[1]


async def test_a_template_without_a_clock_binds_no_time(
    tmp_path: Path, dump_root: Path, prompts: Path, out: Path, notes: Notes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    async with FakeServer(dump_root).running() as server:
        for moment in (FIRST, LATER):
            options = wishes(server, prompts, out, now=moment)
            reading = options.input.reading
            plain = replace(reading, template=replace(reading.template, text=None))
            await run(changed(options, reading=plain), notes)
    assert stated_time(out) is None


async def test_a_data_set_of_an_older_version_continues_only_with_the_time_of_its_rows(
    tmp_path: Path, dump_root: Path, prompts: Path, out: Path, notes: Notes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    at(monkeypatch, FIRST)
    await begin(dump_root, prompts, out, notes)
    forget_time(out)
    at(monkeypatch, LATER)
    async with FakeServer(dump_root).running() as server:
        with pytest.raises(ConfigMismatch) as caught:
            await run(wishes(server, prompts, out), notes)
        message = str(caught.value)
        assert f"{prompts}:1: row 0 gives another prompt than the one that is stored" in message
        assert message.endswith("name the date of its first run: --now 2026-01-31")
        assert server.requests == []
        await run(wishes(server, prompts, out, now=FIRST), notes)
        assert stated_time(out) == FIRST  # now recorded
        await run(wishes(server, prompts, out), notes)
    assert times_in(out, str(tmp_path / "tokenizer")) == {"31 Jan 2026 23:59:59"}
    assert audit(out).findings.all == []


async def test_a_finished_data_set_of_an_older_version_is_left_as_it_is(
    dump_root: Path, prompts: Path, out: Path, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    at(monkeypatch, FIRST)
    async with FakeServer(dump_root).running() as server:
        await run(wishes(server, prompts, out), notes)
        forget_time(out)
        at(monkeypatch, LATER)
        await run(wishes(server, prompts, out), notes)
    assert stated_time(out) is None
    assert audit(out).findings.all == []


OTHER_VERSION = """
def find_spec(name, path=None, target=None):
    if name == "prompts.render":
        sys.meta_path.remove(finder)
        from prompts.tokenizer import ChatTokenizer
        original = ChatTokenizer.render

        def changed(*args, **kwargs):
            text = original(*args, **kwargs)
            return text.replace("It is", "It was") if {sign!r} in text else text

        ChatTokenizer.render = changed

import sys, types
finder = types.SimpleNamespace(find_spec=find_spec)
sys.meta_path.insert(0, finder)
"""


def change_rendering(monkeypatch: pytest.MonkeyPatch, folder: Path, sign: str) -> None:
    """Change every rendering that contains `sign`, as another version of a package might."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(OTHER_VERSION.format(sign=sign))
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


async def test_stored_rows_that_now_give_other_prompts_stop_the_run_before_it_sends(
    tmp_path: Path, dump_root: Path, prompts: Path, out: Path, notes: Notes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    await begin(dump_root, prompts, out, notes, now=FIRST)
    before = rows_of(out)
    store = Store.create_or_open(out / MANIFEST_NAME)
    store.amend("libraries", {**store.identity()["libraries"], "transformers": "0.1"})
    store.close()
    change_rendering(monkeypatch, tmp_path / "changed", "question 5<")
    async with FakeServer(dump_root).running() as server:
        with pytest.raises(ConfigMismatch) as caught:
            await run(wishes(server, prompts, out), notes)
        assert server.requests == []
    message = str(caught.value)
    assert message.startswith(f"{out}: {prompts}:6: row 5 gives another prompt than the one that")
    assert "\n  transformers: begun with 0.1, now " in message
    assert rows_of(out) == before


async def test_a_planned_row_that_now_gives_another_prompt_stops_the_run(
    tmp_path: Path, dump_root: Path, prompts: Path, out: Path, notes: Notes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A planned row is compared when it is read again."""

    def reject(number: int, rid: str) -> Fault | None:
        return Fault.REJECT if f"-{NUM_ROWS - 1}-" in rid else None

    async with FakeServer(dump_root, faults=reject).running() as server:
        await run(wishes(server, prompts, out, now=FIRST), notes)
    assert len(read_samples(out)) == NUM_ROWS - 1
    with monkeypatch.context() as patch:
        change_rendering(patch, tmp_path / "changed", f"question {NUM_ROWS - 1}<")
        async with FakeServer(dump_root).running() as server:
            with pytest.raises(BaseException) as caught:
                await run(wishes(server, prompts, out, retry_failed=True), notes)
    error = first_known(caught.value)
    assert isinstance(error, PromptChanged) and exit_code(error) == 2
    assert str(error).startswith(f"row {NUM_ROWS - 1} (line {NUM_ROWS} of its file) gives another")
    async with FakeServer(dump_root).running() as server:
        await run(wishes(server, prompts, out), notes)
    assert len(read_samples(out)) == NUM_ROWS
    assert audit(out).findings.all == []

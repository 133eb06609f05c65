"""Files that lie, prompts that would like to be paths, and a key that must not be told."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
from aiohttp import web
from helpers import (
    Notes,
    assert_whole,
    make_prompts,
    options_for,
    read_header,
    run,
    run_options,
    write_prompts,
)
from hostile.make import HERE, REASONS, files

from extractor.core.errors import ExtractorError, ServerError, UsageError
from extractor.dumps.dump_reader import BrokenFile, DumpWatcher, Rank
from extractor.servers.api_key import API_KEY_VARIABLE
from extractor.testing.fake_server import FakeServer
from extractor.verify.audit import audit
from extractor.verify.repair import audit_and_repair
from manifest.states import State
from server_patch.directory import Directory
from server_patch.dump_format import READY_NAME, DumpFormatError, decode_ready

FILES = sorted(HERE.glob("*.safetensors"))


def test_the_kept_files_are_those_that_are_described() -> None:
    assert {path.stem: path.read_bytes() for path in FILES} == files()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_hostile_dump_is_refused_with_the_reason_and_without_reading_what_it_claims(
    path: Path,
) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(DumpFormatError) as caught:
            read_header(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert REASONS[path.stem] in str(caught.value)
    assert str(path) in str(caught.value)
    assert peak_bytes < 4 << 20


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
async def test_a_hostile_dump_does_not_stop_a_run(
    tmp_path: Path, dump_root: Path, notes: Notes, path: Path
) -> None:
    prompts = make_prompts(3)
    async with FakeServer(dump_root).running() as server:
        (server.directory / "0000000999.safetensors").write_bytes(path.read_bytes())
        rank = Rank(
            directory=Directory.open(server.directory),
            ready=decode_ready((server.directory / READY_NAME).read_bytes()),
        )
        ((_, arrival),) = DumpWatcher([rank]).poll()
        assert isinstance(arrival, BrokenFile)
        options = options_for(
            server, write_prompts(tmp_path / "p.jsonl", prompts), tmp_path / "out"
        )
        await run(options, notes)
    assert_whole(tmp_path / "out", prompts)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
async def test_a_hostile_shard_is_a_finding_and_can_be_repaired(
    tmp_path: Path, dump_root: Path, notes: Notes, path: Path
) -> None:
    prompts = make_prompts(4)
    out = tmp_path / "out"
    async with FakeServer(dump_root).running() as server:
        options = options_for(server, write_prompts(tmp_path / "p.jsonl", prompts), out)
        await run(options, notes)
        shard = out / "shards" / "shard-000000.safetensors"
        shard.write_bytes(path.read_bytes())
        assert not audit(out).is_clean
        assert not audit(out, fast=True).is_clean
        audit_and_repair(out)
        await run(options, notes)
    assert_whole(out, prompts)


async def test_nothing_of_a_prompt_file_becomes_a_path(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    labels = [
        "../../evil",
        "/etc/evil",
        "a/b",
        "..",
        "",
        "x\x00y",
        "~/evil",
        "-rf",
        "$(touch evil)",
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"id": x, "input_ids": [1, 2]}) + "\n" for x in labels))
    before = {p for p in tmp_path.rglob("*")}
    async with FakeServer(dump_root).running() as server:
        before.add(server.directory.parent)
        summary = await run(options_for(server, path, tmp_path / "out"), notes)
    assert summary.totals.by_state == {State.STORED: len(labels)}
    made = {str(p.relative_to(tmp_path)) for p in {*tmp_path.rglob("*")} - before}
    boot = server.directory.relative_to(tmp_path)
    assert made == {
        "out", "out/.lock", "out/dataset.json", "out/manifest.sqlite", "out/shards",
        "out/shards/shard-000000.safetensors", str(boot), str(boot / READY_NAME),
    }  # fmt: skip


class LockedServer(FakeServer):
    """Wants an API key, and remembers what it was given."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.given: set[str | None] = set()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self.given.add(request.headers.get("Authorization"))
        return await super()._generate(request)


class RefusingServer(FakeServer):
    async def _model_info(self, request: web.Request) -> web.Response:
        return web.Response(status=401)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (None, f"answers 401: it wants an API key. Set {API_KEY_VARIABLE}"),
        ("wrong", f"answers 401: it wants another API key than {API_KEY_VARIABLE} holds"),
        ("with\nline", f"{API_KEY_VARIABLE} holds a character that is not printable ASCII"),
    ],
)
async def test_a_key_that_is_refused_is_told_from_a_server_that_is_not_there(
    tmp_path: Path,
    dump_root: Path,
    notes: Notes,
    monkeypatch: pytest.MonkeyPatch,
    key: str | None,
    message: str,
) -> None:
    if key is not None:
        monkeypatch.setenv(API_KEY_VARIABLE, key)
    path = write_prompts(tmp_path / "p.jsonl", make_prompts(3))
    async with RefusingServer(dump_root).running() as server:
        with pytest.raises(ExtractorError) as caught:
            await run(options_for(server, path, tmp_path / "out"), notes)
    assert message in str(caught.value)


def test_a_password_in_the_address_is_refused_and_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no user or password") as caught:
        run_options(server_urls=("http://me:hunter2@127.0.0.1:30000",))
    assert "hunter2" not in str(caught.value)


async def test_the_api_key_goes_to_the_server_and_nowhere_else(
    tmp_path: Path, dump_root: Path, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "sk-very-secret-0123456789"
    monkeypatch.setenv(API_KEY_VARIABLE, key)
    path = write_prompts(tmp_path / "p.jsonl", make_prompts(3))
    server = LockedServer(dump_root)
    async with server.running():
        options = options_for(server, path, tmp_path / "out")
        summary = await run(options, notes)
    assert server.given == {f"Bearer {key}"}
    with pytest.raises(ServerError) as caught:  # nobody answers any more
        await run(options_for(server, path, tmp_path / "other"), notes)
    told = [
        str(caught.value),
        *notes.messages,
        json.dumps(summary.to_document(options.output.directory)),
    ]
    assert not any(key in text for text in told)
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert not [p for p in files if key.encode() in p.read_bytes()]

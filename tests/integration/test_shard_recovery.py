"""Shards whose manifest is lost or older than they are: nothing writes over them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import Notes, assert_whole, make_prompts, options_for, run, write_prompts

from extractor.core.errors import UsageError
from extractor.core.locations import MANIFEST_NAME
from extractor.core.run_options import RunOptions
from extractor.testing.fake_server import FakeServer
from extractor.verify.audit import audit
from extractor.verify.repair import audit_and_repair
from manifest.store import Store

PROMPTS = make_prompts(12, shortest=20)


@pytest.fixture
async def options(tmp_path: Path, dump_root: Path, notes: Notes) -> RunOptions:
    """Those of a run that is through, into several shards."""
    async with FakeServer(dump_root).running() as server:
        path = write_prompts(tmp_path / "p.jsonl", PROMPTS)
        options = options_for(server, path, tmp_path / "out", shard_bytes=40_000)
        await run(options, notes)
    return options


def files_of(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (out / "shards").iterdir()}


def lose(manifest: Path) -> None:
    manifest.unlink()


def empty(manifest: Path) -> None:
    manifest.write_bytes(b"")


def begin_anew(manifest: Path) -> None:
    """As a run leaves it that was refused before it began."""
    manifest.unlink()
    Store.create_or_open(manifest).close()


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lose, "is missing"), (empty, "is an empty file"), (begin_anew, "knows of no data set"),
    ],
)  # fmt: skip
async def test_shards_without_their_manifest_are_not_written_over(
    options: RunOptions,
    dump_root: Path,
    notes: Notes,
    damage: Callable[[Path], None],
    says: str,
    is_open: bool,
) -> None:
    manifest = options.output.directory / MANIFEST_NAME
    kept = manifest.read_bytes()
    if is_open:
        for path in (options.output.directory / "shards").iterdir():
            path.rename(path.with_name(f".{path.stem}.open"))
    before = files_of(options.output.directory)
    assert len(before) > 1
    damage(manifest)
    async with FakeServer(dump_root).running() as server:
        again = options_for(
            server, options.input.paths[0], options.output.directory, shard_bytes=40_000
        )
        with pytest.raises(UsageError, match=says) as caught:
            await run(again, notes)
        assert "Restore manifest.sqlite from a copy, or name another --out" in str(caught.value)
        assert sorted(before)[0] in str(caught.value)
        (finding,) = audit(options.output.directory).findings.all
        assert (finding.kind, says in finding.detail) == ("manifest_damaged", True)
        _, repair = audit_and_repair(options.output.directory)
        assert says in (repair.refused or "")
        assert files_of(options.output.directory) == before
        if not is_open:
            manifest.write_bytes(kept)  # what the message says to do
            await run(again, notes)
            assert_whole(options.output.directory, PROMPTS)


async def test_shards_that_an_older_manifest_does_not_know_are_not_written_over(
    options: RunOptions, dump_root: Path, notes: Notes
) -> None:
    store = Store.create_or_open(options.output.directory / MANIFEST_NAME)
    last = max(shard.number for shard in store.shards())
    store.forget_stored([row.ordinal for row in store.shard_rows(last)])
    store.drop_shard(last)
    store.close()
    before = files_of(options.output.directory)
    async with FakeServer(dump_root).running() as server:
        again = options_for(
            server, options.input.paths[0], options.output.directory, shard_bytes=40_000
        )
        with pytest.raises(UsageError, match=f"shard-{last:06d}.*does not know of them"):
            await run(again, notes)
    assert files_of(options.output.directory) == before


async def test_a_repair_says_that_it_leaves_unknown_shards_alone(options: RunOptions) -> None:
    source = options.output.directory / "shards" / "shard-000000.safetensors"
    stray = source.with_name("shard-000777.safetensors")
    shutil.copy(source, stray)
    found, repair = audit_and_repair(options.output.directory)
    assert [finding.kind for finding in found.findings.all] == ["shard_unknown"]
    assert repair.unknown == [str(stray)]
    assert "left alone 1 file that this data set did not write" in repair.to_text()
    assert str(stray) in repair.to_text()
    assert stray.read_bytes() == source.read_bytes()

"""`verify --repair`: what is proven stays, the rest is planned again."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from helpers import (
    Notes,
    assert_whole,
    make_prompts,
    options_for,
    read_samples,
    rows_of,
    run,
    write_prompts,
)

from extractor.core.errors import OutputBusy, UsageError, exit_code
from extractor.core.locations import MANIFEST_NAME
from extractor.system.lock import LOCK_NAME, exclusive
from extractor.testing.fake_server import FakeServer
from extractor.verify.audit import audit
from extractor.verify.findings import FindingKind
from extractor.verify.repair import Repair, audit_and_repair
from manifest.exceptions import ManifestMissing
from manifest.states import State

PROMPTS = make_prompts(20, shortest=20)


@pytest.fixture
async def out(tmp_path: Path, dump_root: Path, notes: Notes) -> Path:
    """A finished data set of several shards."""
    async with FakeServer(dump_root).running() as server:
        path = write_prompts(tmp_path / "p.jsonl", PROMPTS)
        await run(options_for(server, path, tmp_path / "out", shard_bytes=40_000), notes)
    return tmp_path / "out"


def shards(out: Path) -> list[Path]:
    return sorted((out / "shards").iterdir())


def flip_last_byte(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_a_sound_data_set_is_left_as_it_is(out: Path) -> None:
    before = {path: path.read_bytes() for path in shards(out)}
    found, repair = audit_and_repair(out)
    assert found.is_clean
    assert repair == Repair(shards=0, kept=0, planned=0)
    assert {path: path.read_bytes() for path in shards(out)} == before


def test_only_the_damaged_sample_is_planned_again(out: Path) -> None:
    before = read_samples(out)
    flip_last_byte(shards(out)[0])
    found, repair = audit_and_repair(out)
    assert not found.is_clean
    planned = [row.ordinal for row in rows_of(out) if row.state is State.PLANNED]
    assert (repair.shards, repair.planned, len(planned)) == (1, 1, 1)
    del before[planned[0]]
    assert {n: s.digest for n, s in read_samples(out).items()} == {
        n: s.digest for n, s in before.items()
    }
    assert {finding.kind.value for finding in audit(out).findings.all} == {"row_unfinished"}


async def test_an_open_shard_waits_for_the_run_that_seals_it(
    out: Path, tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    sealed = shards(out)[1]
    name = sealed.name
    sealed.rename(sealed.with_name(f".{sealed.stem}.open"))
    database = sqlite3.connect(out / MANIFEST_NAME)
    database.execute("UPDATE shards SET is_sealed = 0, digest = NULL WHERE name = ?", (name,))
    database.commit()
    database.close()
    data = bytearray(sealed.with_name(f".{sealed.stem}.open").read_bytes())
    data[-8000] ^= 1
    sealed.with_name(f".{sealed.stem}.open").write_bytes(data)
    _, repair = audit_and_repair(out)
    assert repair.shards == 0
    async with FakeServer(dump_root).running() as server:
        options = options_for(server, tmp_path / "p.jsonl", out, shard_bytes=40_000)
        await run(options, notes)
        assert audit_and_repair(out)[1].planned == 1
        await run(options, notes)
    assert_whole(out, PROMPTS)


def test_a_data_set_that_is_being_written_is_not_repaired(out: Path) -> None:
    with exclusive(out), pytest.raises(OutputBusy):
        audit_and_repair(out)


def on_manifest(out: Path, *statements: str) -> None:
    database = sqlite3.connect(out / MANIFEST_NAME)
    for statement in statements:
        database.execute(statement)
    database.commit()
    database.close()


def test_a_repair_recomputes_the_counts_from_the_rows(out: Path) -> None:
    on_manifest(
        out,
        "UPDATE tallies SET num_rows = num_rows + 1 WHERE state = 'stored'",
        "UPDATE shards SET num_samples = 0, end_bytes = 7, name = '../x' WHERE number = 1",
    )
    before = {path: path.read_bytes() for path in shards(out)}
    found, repair = audit_and_repair(out)
    assert found.findings.counts[FindingKind.MANIFEST_DAMAGED] == 3
    assert (repair.rows, repair.planned, repair.refused) == (0, 0, None)
    assert audit(out).is_clean
    # The manifest gave it a size of 7 bytes, so it was replaced, like any damaged shard.
    assert len(set(shards(out)) - set(before)) == 1
    assert read_samples(out).keys() == set(range(len(PROMPTS)))


def test_a_manifest_that_cannot_be_read_cannot_be_repaired_from_itself(out: Path) -> None:
    on_manifest(out, "UPDATE identity SET value = '9' WHERE name = 'num_layers'")
    before = (out / MANIFEST_NAME).read_bytes()
    found, repair = audit_and_repair(out)
    assert FindingKind.MANIFEST_DAMAGED in found.findings.counts
    assert repair.refused is not None
    assert "identity, row 'num_layers': its checksum is not that" in repair.refused
    assert "restore it from a copy" in repair.refused
    assert (out / MANIFEST_NAME).read_bytes()[100:] == before[100:]


def test_a_data_set_on_a_read_only_mount_is_checked_and_not_repaired(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def open_read_only(path: str | Path, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_read_only)
    assert audit(out).is_clean
    with pytest.raises(UsageError, match=r"read-only .EROFS: Read-only file system"):
        audit_and_repair(out)


def test_a_directory_without_a_data_set_is_not_repaired_and_gets_no_lock(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name in ("nowhere", "there"):
        with pytest.raises(ManifestMissing, match="no manifest there") as caught:
            audit_and_repair(tmp_path / name)
        assert exit_code(caught.value) == 2
    assert not (tmp_path / "there" / LOCK_NAME).exists()


@pytest.mark.parametrize(
    ("repair", "text"),
    [
        (Repair(shards=1, kept=1, planned=2), "repaired 1 shard: 1 sample kept, 2 to be extracted"),
        (Repair(shards=2, kept=0, planned=3), "repaired 2 shards: 0 samples kept, 3 to be"),
        (Repair(shards=0, kept=0, planned=0), "nothing to repair"),
    ],
)
def test_a_repair_counts_in_words(repair: Repair, text: str) -> None:
    assert repair.to_text().startswith(text)


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_dataset_json_is_written_again_from_the_manifest(out: Path, how: str) -> None:
    path = out / "dataset.json"
    before = path.read_bytes()
    path.unlink()
    if how == "damaged":
        path.write_bytes(before[:100])
    found, repair = audit_and_repair(out)
    assert {finding.kind for finding in found.findings.all} == {FindingKind.PROVENANCE}
    assert repair.dataset
    assert repair.to_text() == "wrote dataset.json again from the manifest"
    assert path.read_bytes() == before
    assert audit(out).is_clean


def test_a_shard_that_is_a_pipe_is_left_and_extracted_again_once_it_is_gone(out: Path) -> None:
    path, *_ = shards(out)
    path.unlink()
    os.mkfifo(path)
    _, repair = audit_and_repair(out)
    assert (repair.shards, repair.unknown) == (0, [str(path)])
    assert "that this data set did not write" in repair.to_text()
    path.unlink()
    _, repair = audit_and_repair(out)
    assert repair.shards == 1
    assert repair.planned > 0

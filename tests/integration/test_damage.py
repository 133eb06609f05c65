"""Damage to any file of a data set: `verify` always ends in a verdict, and a correct one."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fuzz.mutation import put
from helpers import stored_rows
from hostile.damage import (
    content,
    make_data_set,
    make_data_set_async,
    recompute_checksums,
    repair_and_go_on,
    unseal,
    verdict_on,
)

from extractor.cli.main import cli
from extractor.core.locations import MANIFEST_NAME
from extractor.status.live_file import LIVE_NAME
from extractor.testing.fake_server import FakeServer
from extractor.verify.audit import audit
from extractor.verify.findings import MAX_FINDINGS, Audit, FindingKind
from extractor.verify.repair import audit_and_repair

PER_TEST = 500


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound data set, which every test restores."""
    return make_data_set(tmp_path_factory.mktemp("damage"))


@pytest.fixture(scope="module")
def sound(out: Path) -> dict[str, Any]:
    assert audit(out).findings.all == []
    return content(out)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_damage_that_changes_content_is_never_called_clean(
    out: Path, sound: dict[str, Any], part: int
) -> None:
    clean = [
        str(damaged)
        for seed in range(part * PER_TEST, (part + 1) * PER_TEST)
        for damaged, found in [verdict_on(out, seed, sound)]
        if found.is_clean
    ]
    # Bytes that SQLite does not use for any row are not content. Most other damage is found.
    assert len(clean) < PER_TEST * 2 // 3
    assert content(out) == sound


@pytest.mark.slow
def test_damage_to_the_files_of_a_killed_run_ends_in_a_verdict(tmp_path: Path, out: Path) -> None:
    unfinished = Path(shutil.copytree(out, tmp_path / "out"))
    unseal(unfinished)
    for seed in range(50_000, 50_200):
        verdict_on(unfinished, seed, None)


async def test_a_repair_and_a_run_restore_everything_or_the_repair_changes_nothing(
    tmp_path: Path,
) -> None:
    master = await make_data_set_async(tmp_path)
    expected = content(master)
    refused = 0
    async with FakeServer(tmp_path / "dumps").running() as server:
        for seed in range(30):
            copy = Path(shutil.copytree(master, tmp_path / "copy"))
            _, repair = await repair_and_go_on(copy, seed, server, tmp_path / "p.jsonl", expected)
            refused += repair.refused is not None
            shutil.rmtree(copy)
    assert 0 < refused < 15


# --- one value -----------------------------------------------------------------------------------

BAD_TEXT = "CAST(x'ff41' AS TEXT)"
#: Table -> column -> invalid values, as SQL expressions.
PLANTED = {
    "prompts": {
        "source": ("9", "-1", "'x'", "NULL"),
        "line": ("0", "1", "'x'", "NULL"),
        "label": (BAD_TEXT, "'{'", "x'05'", "'" + "[" * 100_000 + "'"),
        "key": ("'x'", "NULL", "x'05'", BAD_TEXT),
        "num_tokens": ("1 << 60", "-1", "'x'", "NULL", "0", "1.5", "num_tokens + 1"),
        "num_trained": ("1 << 60", "-1", "'x'", "NULL", "num_trained + 1"),
        "state": ("'stnred'", "NULL", "x'00'", "'failed'", "'planned'", BAD_TEXT),
        "reason": ("'nonsense'", "x'05'", "'bad_json'", BAD_TEXT),
        "detail": (BAD_TEXT, "x'05'"),
        "attempts": ("'x'", "-1", "NULL"),
        "num_deaths": ("'x'", "-1", "NULL"),
        "shard": ("77", "-1", "'x'", "NULL"),
        "offset": ("1 << 62", "-5", "'x'", "NULL", "offset + 1"),
        "size_bytes": ("1 << 62", "-5", "'x'", "NULL", "0"),
        "digest": ("'zz'", "NULL", "x'05'", "upper(digest)", "digest || '0'", BAD_TEXT),
        "num_pieces": ("0", "'x'", "NULL"),
        "part": ("'x'", "-1"),
        "alterations": ("'nonsense'", "x'05'", BAD_TEXT),
        "checksum": ("NULL", "5", "'x'"),
    },
    "shards": {
        "number": ("1 << 60",),
        "name": ("'../../manifest.sqlite'", "'/etc/passwd'", "'x'", BAD_TEXT, "NULL"),
        "data_start": ("1 << 40", "-1", "0", "'x'", "NULL"),
        "is_sealed": ("7", "'x'", "NULL", "0"),
        "end_bytes": ("1 << 62", "-1", "'x'"),
        "num_samples": ("1 << 62", "-1", "'x'", "0"),
        "digest": ("NULL", "'x'", "x'05'", BAD_TEXT),
    },
    "sources": {
        "number": ("7", "-1"),
        "path": (BAD_TEXT, "x'05'", "NULL"),
        "size_bytes": ("'x'", "-1"),
        "digest": ("'x'", "NULL", BAD_TEXT),
        "num_rows": ("1 << 60", "-1", "'x'", "NULL"),
        "checksum": ("NULL", "5"),
    },
    "identity": {
        "name": ("'x'", BAD_TEXT),
        "value": ("'{'", "'NaN'", "'1e999'", BAD_TEXT, "x'05'"),
    },
    "tallies": {
        "state": ("'x'", BAD_TEXT),
        "reason": ("'x'", "'bad_json'"),
        "num_rows": ("'x'", "-1", "num_rows + 1", "1 << 62"),
        "num_tokens": ("'x'", "num_tokens + 1"),
    },
}
WHERE = {
    "prompts": "ordinal = 3", "shards": "number = 0", "sources": "number = 0",
    "identity": "name = 'hidden_size'", "tallies": "state = 'stored'",
}  # fmt: skip


def plant(out: Path, table: str, column: str, value: str) -> None:
    """Write a value that SQLite's checks would refuse, and a matching checksum."""

    def on_schema(statement: str) -> None:
        connection = sqlite3.connect(out / MANIFEST_NAME)
        connection.execute("PRAGMA writable_schema = ON")
        with connection:
            connection.execute(statement, (table,))
        connection.close()

    connection = sqlite3.connect(out / MANIFEST_NAME)
    ((before,),) = connection.execute("SELECT sql FROM sqlite_schema WHERE name = ?", (table,))
    connection.close()
    loose = (
        re.sub("(INTEGER|TEXT) NOT NULL", r"\1", before.replace("STRICT", "")).rstrip().rstrip(",")
    )
    on_schema(f"UPDATE sqlite_schema SET sql = {_quoted(loose)} WHERE name = ?")
    connection = sqlite3.connect(out / MANIFEST_NAME)
    connection.execute("PRAGMA ignore_check_constraints = ON")
    with connection:
        connection.execute(f"UPDATE {table} SET {column} = {value} WHERE {WHERE[table]}")
        if column != "checksum":
            recompute_checksums(connection)
    connection.close()
    on_schema(f"UPDATE sqlite_schema SET sql = {_quoted(before)} WHERE name = ?")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        pytest.param(table, column, value, id=f"{table}-{column}-{value[:20]}")
        for table, columns in PLANTED.items()
        for column, values in columns.items()
        for value in values
    ],
)
def test_a_value_that_no_writer_wrote_is_a_finding(
    tmp_path: Path, out: Path, table: str, column: str, value: str
) -> None:
    copy = Path(shutil.copytree(out, tmp_path / "out"))
    others = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    plant(copy, table, column, value)
    tracemalloc.start()
    try:
        found = audit(copy)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert not found.is_clean
    assert peak_bytes < 40 << 20
    assert json.loads(json.dumps(found.to_document()))["clean"] is False
    if table == "prompts" and column not in ("state", "reason", "shard"):
        # Only the damaged row is named, and the one behind it in its shard.
        rows = sorted(stored_rows(out), key=lambda row: (row.sample.shard, row.sample.offset))
        ordinals = [row.ordinal for row in rows]
        named = {finding.row for finding in found.findings.all if finding.row is not None}
        assert 3 in named
        assert named <= {3, *ordinals[ordinals.index(3) + 1 :][:1]}
    audit_and_repair(copy)
    gone = {path.name for path in others if not path.exists()}
    assert gone <= {"shard-000000.safetensors", ".live.json"}


# --- whole files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pipe", "directory", "link", "file", "zeros", "deep", "large"])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (MANIFEST_NAME, FindingKind.MANIFEST_DAMAGED),
        ("dataset.json", FindingKind.PROVENANCE),
        (LIVE_NAME, FindingKind.LIVE_DAMAGED),
        ("shards/shard-000001.safetensors", FindingKind.SHARD_MISSING),
        ("shards", FindingKind.SHARD_MISSING),
    ],
)
def test_foreign_content_in_place_of_a_file_is_a_finding_and_never_blocks(
    tmp_path: Path, out: Path, name: str, expected: FindingKind, kind: str
) -> None:
    copy = Path(shutil.copytree(out, tmp_path / "out"))
    put(copy / name, kind)
    tracemalloc.start()
    try:
        found = audit(copy)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 40 << 20
    if name.startswith("shards/") and kind in ("file", "zeros", "deep", "large"):
        expected = FindingKind.SHARD_HEADER
    assert expected in found.findings.counts
    assert json.loads(json.dumps(found.to_document()))["clean"] is False
    audit_and_repair(copy)


def test_a_shard_that_begins_nowhere_takes_no_memory(tmp_path: Path, out: Path) -> None:
    """The manifest states a header of 6 GB, and the file has that size."""
    copy = Path(shutil.copytree(out, tmp_path / "out"))
    plant(copy, "shards", "data_start", str(6 << 30))
    with (copy / "shards" / "shard-000000.safetensors").open("r+b") as file:
        file.truncate(7 << 30)
    tracemalloc.start()
    try:
        found = audit(copy)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert FindingKind.MANIFEST_DAMAGED in found.findings.counts
    assert peak_bytes < 60 << 20


def test_many_findings_are_counted_and_not_all_kept(tmp_path: Path) -> None:
    found = Audit()
    for row in range(MAX_FINDINGS + 5):
        found.findings.find(FindingKind.ROW_UNFINISHED, "line 1 is planned\x1b[31m", row=row)
    assert len(found.findings.all) == MAX_FINDINGS
    assert found.to_document()["finding_counts"] == {"row_unfinished": MAX_FINDINGS + 5}
    assert "FINDING  row_unfinished: 10,005" in found.to_text()
    assert "\x1b" not in found.to_text()


# --- output for users ----------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 100, 4096 + 7])
def test_verify_json_works_for_every_state_of_the_manifest(
    tmp_path: Path, out: Path, at: int
) -> None:
    copy = Path(shutil.copytree(out, tmp_path / "out"))
    data = bytearray((copy / MANIFEST_NAME).read_bytes())
    data[at : at + 400] = b"\xff" * 400
    (copy / MANIFEST_NAME).write_bytes(data)
    for option in ([], ["--repair"]):
        done = CliRunner().invoke(cli, ["verify", str(copy), "--json", *option])
        assert done.exit_code == 1, done.output
        document = json.loads(done.stdout)
        assert document["clean"] is False
        assert document["finding_counts"]["manifest_damaged"] >= 1
    assert "Nothing was changed" in document["repair"]["refused"]
    shown = CliRunner().invoke(cli, ["verify", str(copy), "--repair"])
    assert shown.exit_code == 1
    assert "not repaired: " in shown.stdout and "Traceback" not in shown.output


def test_a_field_of_dataset_json_that_differs_is_named(tmp_path: Path, out: Path) -> None:
    copy = Path(shutil.copytree(out, tmp_path / "out"))
    document = json.loads((copy / "dataset.json").read_bytes())
    document["dtype"], document["more"] = "F32", 1
    del document["model"]
    (copy / "dataset.json").write_text(json.dumps(document))
    details = [finding.detail.partition(": ")[2] for finding in audit(copy).findings.all]
    assert details == [
        "dtype is 'F32', the manifest says 'BF16'",
        "model is missing, the manifest says 'fake/model'",
        "more is 1, the manifest says missing",
    ]


def test_a_sample_that_is_sound_outlives_the_repair_of_its_neighbours_row(
    tmp_path: Path, out: Path
) -> None:
    copy = Path(shutil.copytree(out, tmp_path / "out"))
    plant(copy, "prompts", "label", BAD_TEXT)
    found, repair = audit_and_repair(copy)
    assert found.findings.damaged_rows == {3}
    assert (repair.rows, repair.shards, repair.planned, repair.refused) == (1, 1, 0, None)
    assert repair.kept > 1
    left = audit(copy)
    assert set(left.findings.counts) == {FindingKind.ROWS_UNACCOUNTED}
    assert left.samples_checked == 24

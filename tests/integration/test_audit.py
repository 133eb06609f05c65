"""`verify` finds what is wrong with a data set, and nothing when nothing is."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from helpers import (
    Notes,
    assert_whole,
    make_prompts,
    options_for,
    stored_rows,
    write_prompts,
)
from hostile.damage import recompute_checksums

from extractor.pipeline.run import run
from extractor.system.lock import LOCK_NAME, writer_of
from extractor.testing.fake_server import FakeServer
from extractor.verify.audit import audit
from extractor.verify.findings import FindingKind
from manifest.bulk_write import count_again
from manifest.exceptions import ManifestMissing
from manifest.records import StoredRow
from manifest.store import Store

PROMPTS = make_prompts(25, shortest=10)


@pytest.fixture(scope="session")
def master(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good data set of several shards, which every test damages a copy of."""
    directory = tmp_path_factory.mktemp("master")
    (directory / "dumps").mkdir()

    async def make() -> None:
        async with FakeServer(directory / "dumps").running() as server:
            path = write_prompts(directory / "p.jsonl", PROMPTS)
            options = options_for(
                server, path, directory / "out", shard_bytes=50_000, concurrency=2
            )
            await run(options, Notes())

    asyncio.run(make())
    return directory / "out"


@pytest.fixture
def out(master: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(master, tmp_path / "out"))


def shard(out: Path, number: int = 0) -> Path:
    return out / "shards" / f"shard-{number:06d}.safetensors"


def kinds(out: Path, *, fast: bool = False) -> set[FindingKind]:
    return {finding.kind for finding in audit(out, fast=fast).findings.all}


def flip(path: Path, offset: int, bits: int = 0xFF) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ bits]))


def sql(out: Path, statement: str, *values: object) -> None:
    connection = sqlite3.connect(out / "manifest.sqlite")
    with connection:
        connection.execute("PRAGMA foreign_keys = OFF")
        connection.execute(statement, values)
    connection.close()


def change_rows(out: Path, statement: str, *values: object) -> None:
    """Change rows so that they are wrong although their totals and checksums are right."""
    sql(out, statement, *values)
    connection = sqlite3.connect(out / "manifest.sqlite")
    with connection:
        count_again(connection)
        recompute_checksums(connection)
    connection.close()


def samples(out: Path, number: int = 0) -> list[StoredRow]:
    rows = [row for row in stored_rows(out) if row.sample.shard == number]
    return sorted(rows, key=lambda row: row.sample.offset)


def test_a_good_data_set_is_clean(out: Path) -> None:
    result = audit(out)
    assert result.is_clean
    assert result.samples_checked == len(PROMPTS)
    assert result.bytes_checked == result.contents.totals.stored_bytes
    assert result.contents.num_shards >= 3
    assert_whole(out, PROMPTS)
    assert json.dumps(result.to_document())


def test_checking_changes_nothing(out: Path) -> None:
    def content() -> dict[str, bytes]:
        return {
            str(path): path.read_bytes()
            for path in sorted(out.rglob("*"))
            if path.is_file() and path.suffix not in (".sqlite-wal", ".sqlite-shm")
        }

    before = content()
    audit(out)
    assert {name: data for name, data in content().items() if name in before} == before


@pytest.mark.parametrize("region", ["first", "aux", "last", "input_ids", "loss_mask"])
def test_one_flipped_byte_of_a_sample_is_found(out: Path, region: str) -> None:
    row = samples(out)[1]
    n = row.prompt.num_tokens
    places = {
        "first": 0,
        "aux": n * 48 - 1,
        "last": n * 64 - 1,
        "input_ids": n * 64 + 2 * 4,
        "loss_mask": n * 68 + 2 * 4,
    }
    flip(shard(out), row.sample.offset + places[region], bits=1)
    findings = audit(out).findings.all
    expected = {FindingKind.SAMPLE_DIGEST}
    if region in ("input_ids", "loss_mask"):
        expected.add(FindingKind.SAMPLE_TOKENS)
    assert {finding.kind for finding in findings} == expected
    assert {finding.row for finding in findings} == {row.ordinal}
    # The fast check looks at ids and mask, not at states.
    assert kinds(out, fast=True) == expected - {FindingKind.SAMPLE_DIGEST}


@pytest.mark.parametrize("offset", [0, 7, 8, 100, 2000])
def test_one_flipped_byte_of_a_header_is_found(out: Path, offset: int) -> None:
    flip(shard(out), offset, bits=2)
    # What the header says of itself (`__metadata__`) is checked as well.
    assert kinds(out) == {FindingKind.SHARD_HEADER}


def test_a_sealed_shard_has_the_digest_of_its_header_and_its_samples(out: Path) -> None:
    store = Store.open_read_only(out / "manifest.sqlite")
    stated = {known.number: known.digest for known in store.shards()}
    store.close()
    for number, digest in stated.items():
        data = shard(out, number).read_bytes()
        rows = samples(out, number)
        computed = xxhash.xxh3_128(data[: rows[0].sample.offset])
        for row in rows:
            sample = data[row.sample.offset : row.sample.end]
            computed.update(xxhash.xxh3_128(sample).digest())
        assert digest == computed.hexdigest()


def test_a_changed_byte_that_every_reader_skips_is_found(out: Path) -> None:
    """A space of the header's padding became a tab: no tensor is other for it."""
    with open(shard(out), "rb") as file:
        room = 8 + int.from_bytes(file.read(8), "little")
    flip(shard(out), room - 1, bits=ord(" ") ^ ord("\t"))
    assert kinds(out) == kinds(out, fast=True) == {FindingKind.SHARD_DIGEST}


def test_tallies_that_are_not_those_of_the_rows_are_found(out: Path) -> None:
    sql(out, "UPDATE tallies SET num_rows = num_rows + 1 WHERE state = 'stored'")
    findings = audit(out).findings.all
    assert {finding.kind for finding in findings} == {FindingKind.MANIFEST_DAMAGED}
    assert findings[0].detail == "the tallies are not those of the rows: stored"


def test_a_shard_that_names_other_layers_is_found(out: Path) -> None:
    data = shard(out).read_bytes()
    assert b'"boundaries":"1,2,3"' in data
    shard(out).write_bytes(data.replace(b'"boundaries":"1,2,3"', b'"boundaries":"1,2,4"', 1))
    assert kinds(out) == kinds(out, fast=True) == {FindingKind.SHARD_HEADER}


def test_a_value_that_is_no_number_is_found_though_its_digest_is_right(out: Path) -> None:
    row = samples(out)[0]
    begin = row.sample.offset
    with shard(out).open("r+b") as file:
        file.seek(begin + 6)
        file.write(b"\xc0\x7f")  # bfloat16 NaN
        file.seek(begin)
        digest = xxhash.xxh3_128_hexdigest(file.read(row.sample.size_bytes))
    change_rows(out, "UPDATE prompts SET digest = ? WHERE ordinal = ?", digest, row.ordinal)
    (finding,) = audit(out).findings.all
    assert (finding.kind, finding.row) == (FindingKind.SAMPLE_NONFINITE, row.ordinal)
    assert finding.detail == "aux holds NaN or infinity at row 0, boundary 1"


def test_two_samples_that_changed_places_are_found(out: Path) -> None:
    first, second = samples(out)[:2]
    with shard(out).open("r+b") as file:
        file.seek(first.sample.offset)
        one = file.read(first.sample.size_bytes)
        other = file.read(second.sample.size_bytes)
        file.seek(first.sample.offset)
        file.write(other + one)
    found = {(finding.kind, finding.row) for finding in audit(out).findings.all}
    for row in (first, second):
        assert (FindingKind.SAMPLE_DIGEST, row.ordinal) in found
        assert (FindingKind.SAMPLE_TOKENS, row.ordinal) in found


def test_a_mask_that_is_not_ones_and_zeros_is_found(out: Path) -> None:
    """256 is 0 in the byte that the key is computed from."""
    row = samples(out)[0]
    n = row.prompt.num_tokens
    flip(shard(out), row.sample.offset + n * 68 + 1, bits=1)
    assert FindingKind.SAMPLE_TOKENS in kinds(out, fast=True)


def damage_truncate(out: Path) -> None:
    with shard(out).open("r+b") as file:
        file.truncate(shard(out).stat().st_size - 1)


def damage_append(out: Path) -> None:
    with shard(out).open("ab") as file:
        file.write(b"x")


def damage_to_nothing(out: Path) -> None:
    shard(out).write_bytes(b"")


def damage_last_row(out: Path) -> None:
    row = samples(out)[-1]
    change_rows(out, "DELETE FROM prompts WHERE ordinal = ?", row.ordinal)


def damage_middle_row(out: Path) -> None:
    change_rows(out, "DELETE FROM prompts WHERE ordinal = 3")


def damage_all_rows_behind(out: Path) -> None:
    change_rows(out, "UPDATE sources SET num_rows = num_rows + 2")


def damage_reopen(out: Path) -> None:
    change_rows(out, "UPDATE prompts SET state = 'planned', shard = NULL, offset = NULL, "
             "size_bytes = NULL, digest = NULL WHERE ordinal = 2")  # fmt: skip


def damage_offset(out: Path) -> None:
    change_rows(
        out, "UPDATE prompts SET offset = offset - 4 WHERE ordinal = ?", samples(out)[1].ordinal
    )


def damage_size(out: Path) -> None:
    change_rows(out, "UPDATE prompts SET size_bytes = size_bytes - 4 WHERE ordinal = ?",
        samples(out)[0].ordinal)  # fmt: skip


def damage_num_tokens(out: Path) -> None:
    change_rows(out, "UPDATE prompts SET num_tokens = num_tokens + 1 WHERE ordinal = ?",
        samples(out)[-1].ordinal)  # fmt: skip


def damage_key(out: Path) -> None:
    change_rows(out, "UPDATE prompts SET key = ? WHERE ordinal = 0", "0" * 32)


def damage_unseal(out: Path) -> None:
    sql(out, "UPDATE shards SET is_sealed = 0 WHERE number = 0")


def damage_extra_file(out: Path) -> None:
    (out / "shards" / "shard-000099.safetensors").write_bytes(b"")


def damage_dataset(out: Path) -> None:
    path = out / "dataset.json"
    path.write_bytes(path.read_bytes().replace(b'"last_kind": "post"', b'"last_kind": "pre"'))


def damage_dataset_missing(out: Path) -> None:
    (out / "dataset.json").unlink()


def damage_live(out: Path) -> None:
    (out / ".live.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (damage_truncate, {FindingKind.SHARD_SIZE, FindingKind.SAMPLE_SIZE}),
        (damage_append, {FindingKind.SHARD_SIZE}),
        (
            damage_to_nothing,
            {FindingKind.SHARD_SIZE, FindingKind.SHARD_HEADER, FindingKind.SAMPLE_SIZE},
        ),
        (lambda out: shard(out).unlink(), {FindingKind.SHARD_MISSING}),
        (
            damage_middle_row,
            {FindingKind.ROWS_UNACCOUNTED, FindingKind.SHARD_HEADER, FindingKind.SAMPLE_OVERLAP},
        ),
        (damage_all_rows_behind, {FindingKind.ROWS_UNACCOUNTED}),
        (
            damage_reopen,
            {FindingKind.ROW_UNFINISHED, FindingKind.SHARD_HEADER, FindingKind.SAMPLE_OVERLAP},
        ),
        (
            damage_offset,
            {
                FindingKind.SAMPLE_OVERLAP, FindingKind.SHARD_HEADER, FindingKind.SAMPLE_DIGEST,
                FindingKind.SAMPLE_TOKENS,
            },
        ),
        (damage_size, {FindingKind.SAMPLE_SIZE, FindingKind.SAMPLE_OVERLAP}),
        (damage_num_tokens, {FindingKind.SAMPLE_SIZE, FindingKind.SHARD_HEADER}),
        (damage_key, {FindingKind.SAMPLE_TOKENS}),
        (damage_unseal, {FindingKind.SHARD_UNSEALED}),
        (damage_extra_file, {FindingKind.SHARD_UNKNOWN}),
        (damage_dataset, {FindingKind.PROVENANCE}),
        (damage_dataset_missing, {FindingKind.PROVENANCE}),
        (damage_live, {FindingKind.LIVE_DAMAGED}),
    ],
    ids=lambda value: getattr(value, "__name__", "") if callable(value) else "",
)  # fmt: skip
def test_each_kind_of_damage_is_found(
    out: Path, damage: Callable[[Path], None], expected: set[FindingKind]
) -> None:
    damage(out)
    assert kinds(out) == expected
    # What needs no byte of the states is found without them.
    assert kinds(out, fast=True) == expected - {FindingKind.SAMPLE_DIGEST}


def test_a_missing_last_row_is_found(out: Path) -> None:
    change_rows(out, "DELETE FROM prompts WHERE ordinal = (SELECT MAX(ordinal) FROM prompts)")
    assert FindingKind.ROWS_UNACCOUNTED in kinds(out)


def test_ids_outside_the_vocabulary_are_found(out: Path) -> None:
    change_rows(out, "UPDATE identity SET value = '5' WHERE name = 'vocab_size'")
    assert FindingKind.SAMPLE_TOKENS in kinds(out)


def test_a_damaged_manifest_is_told(out: Path) -> None:
    path = out / "manifest.sqlite"
    connection = sqlite3.connect(path)
    ((page,),) = connection.execute(
        "SELECT rootpage FROM sqlite_schema WHERE name = 'prompts_by_place'"
    ).fetchall()
    ((page_bytes,),) = connection.execute("PRAGMA page_size").fetchall()
    connection.close()
    # An index entry that no row has.
    flip(path, page * page_bytes - 10)
    assert FindingKind.MANIFEST_DAMAGED in kinds(out)


def test_there_is_nothing_to_check_where_nothing_is(tmp_path: Path) -> None:
    with pytest.raises(ManifestMissing):
        audit(tmp_path)


def test_each_kind_has_a_test() -> None:
    text = Path(__file__).read_text()
    assert [kind for kind in FindingKind if f"FindingKind.{kind.name}" not in text] == []


def test_progress_counts_every_sample(out: Path) -> None:
    counts: list[int] = []
    audit(out, progress=counts.append)
    assert sum(counts) == len(PROMPTS)


_HOLD = """
import sys
from pathlib import Path
from extractor.system.lock import exclusive
with exclusive(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_data_set_that_is_being_written_is_called_so(out: Path) -> None:
    database = sqlite3.connect(out / "manifest.sqlite")
    database.execute("UPDATE shards SET is_sealed = 0, digest = NULL WHERE number = 0")
    database.commit()
    database.close()
    command = [sys.executable, "-c", _HOLD, str(out)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            found = audit(out)
        finally:
            holder.kill()
    assert found.writer == holder.pid == found.to_document()["writer"]
    assert f"process {holder.pid} is writing this data set" in found.to_text()
    assert [f.kind for f in found.findings.all] == [FindingKind.SHARD_UNSEALED]
    assert "run the same command again" not in found.to_text()
    # It was killed: what it wrote of itself is still there, and nobody writes.
    assert (out / LOCK_NAME).read_text().startswith(f"{holder.pid} ")
    after = audit(out)
    assert after.writer is None
    assert "run the same command again" in after.to_text()


@pytest.mark.parametrize("text", ["", "12", "1 2 pid:[3]", "x y z", "\0"])
def test_a_lock_that_tells_of_no_process_here_names_none(tmp_path: Path, text: str) -> None:
    assert writer_of(tmp_path) is None
    (tmp_path / LOCK_NAME).write_text(text)
    assert writer_of(tmp_path) is None


@pytest.mark.parametrize("suffix", ["-journal", "-wal", "-shm"])
@pytest.mark.parametrize("kind", ["pipe", "directory"])
def test_something_else_beside_the_manifest_is_a_finding_and_is_never_waited_for(
    out: Path, suffix: str, kind: str
) -> None:
    beside = out / f"manifest.sqlite{suffix}"
    os.mkfifo(beside) if kind == "pipe" else beside.mkdir()
    (finding,) = audit(out).findings.all
    assert finding.kind is FindingKind.MANIFEST_DAMAGED
    assert f"{beside}: not a sound manifest (not a regular file)" in finding.detail


def test_a_journal_of_noise_beside_the_manifest_is_a_finding(out: Path) -> None:
    (out / "manifest.sqlite-journal").write_bytes(bytes(range(1, 256)) * 20)
    (finding,) = audit(out).findings.all
    assert finding.kind is FindingKind.MANIFEST_DAMAGED


@pytest.mark.parametrize("how", ["missing", "empty", "link to nowhere"])
def test_shards_whose_manifest_is_lost_are_a_finding(out: Path, how: str) -> None:
    manifest = out / "manifest.sqlite"
    manifest.unlink()
    match how:
        case "empty":
            manifest.touch()
        case "link to nowhere":
            manifest.symlink_to("nowhere")
    found = audit(out)
    (finding,) = found.findings.all
    assert finding.kind is FindingKind.MANIFEST_DAMAGED
    assert "shard-000000.safetensors" in finding.detail
    assert found.to_document()["clean"] is False


def test_a_difference_within_dataset_json_is_named_by_its_place(out: Path) -> None:
    path = out / "dataset.json"
    document = json.loads(path.read_bytes())
    document["sessions"][0]["servers"][0]["kv_cache_dtype"] = "fp8"
    document["reading"]["thinking"] = "drop"
    path.write_text(json.dumps(document))
    details = [finding.detail for finding in audit(out).findings.all]
    assert details == [
        f"{path}: reading.thinking is 'drop', the manifest says 'template'",
        f"{path}: sessions[0].servers[0].kv_cache_dtype is 'fp8', the manifest says 'auto'",
    ]


def test_each_damaged_field_of_the_identity_is_named(out: Path) -> None:
    sql(out, "UPDATE identity SET checksum = 1 WHERE name IN ('model', 'dtype')")
    details = {finding.detail for finding in audit(out).findings.all}
    for name in ("model", "dtype"):
        assert any(f"identity, row '{name}': its checksum" in detail for detail in details)


def test_a_row_of_a_server_start_that_is_not_on_record_is_found(out: Path) -> None:
    change_rows(out, "UPDATE prompts SET server = 7 WHERE ordinal = 3")
    (finding,) = audit(out).findings.all
    assert (finding.row, finding.detail) == (3, "server is 7, there are 1")


def test_a_damaged_server_start_or_canary_is_found(out: Path) -> None:
    sql(out, "UPDATE server_starts SET url = 'http://elsewhere'")
    sql(out, "UPDATE canaries SET dump = zeroblob(64)")
    details = [finding.detail for finding in audit(out).findings.all]
    assert "server_starts, row 0: its checksum is not that of its columns" in details
    assert "canaries, row 0: its digest is not that of its dump" in details

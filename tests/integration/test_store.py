"""The manifest on a real SQLite file."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlite_utils import Database

from manifest import bulk_write
from manifest.decoding import Damage, row_checksum
from manifest.exceptions import (
    ManifestDamaged,
    ManifestError,
    ManifestMissing,
    ManifestSpaceError,
    PromptChanged,
)
from manifest.reader import _PAGE_ROWS, UNFINISHED
from manifest.records import (
    Change,
    Failed,
    Forgotten,
    Lost,
    Planned,
    PromptFacts,
    Rejected,
    Retried,
    Row,
    Shard,
    Source,
    SourceRow,
    Stored,
    StoredSample,
)
from manifest.schema import migrations
from manifest.states import IllegalTransition, Reason, State
from manifest.store import Store

SOURCE = Source(number=0, path="p.jsonl", size_bytes=10, digest="d", num_rows=100)
SHARD = Shard(number=0, data_start=4096, is_sealed=False, size_bytes=4096, num_samples=0)


def origin(ordinal: int) -> SourceRow:
    return SourceRow(ordinal=ordinal, source=0, line=ordinal + 1)


def planned(ordinal: int, key: str | None = None) -> Planned:
    prompt = PromptFacts(key=key or f"k{ordinal}", num_tokens=5, num_trained=2)
    return Planned(origin=origin(ordinal), prompt=prompt)


def rejected(ordinal: int, detail: str = "") -> Rejected:
    return Rejected(origin=origin(ordinal), reason=Reason.BAD_JSON, detail=detail)


def retried(ordinal: int, attempts: int = 1) -> Retried:
    return Retried(ordinal=ordinal, attempts=attempts)


def stored(ordinal: int, offset: int) -> Stored:
    sample = StoredSample(shard=0, offset=offset, size_bytes=100, digest="x", num_pieces=1)
    return Stored(ordinal=ordinal, sample=sample, attempts=1)


def way_to_store(ordinal: int, offset: int) -> list[Planned | Stored]:
    return [planned(ordinal), stored(ordinal, offset)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "manifest.sqlite"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    store = Store.create_or_open(path)
    store.begin({"model": "m", "boundaries": [1, 2]}, [SOURCE])
    store.add_shard(SHARD)
    yield store
    store.close()


def states(store: Store) -> dict[int, State]:
    return {row.ordinal: row.state for row in store.rows()}


def test_what_was_written_is_there_after_opening_again(store: Store, path: Path) -> None:
    store.apply(way_to_store(0, 4096))
    store.apply([
        planned(1), retried(1, attempts=3), rejected(2),
        planned(3), Failed(ordinal=3, reason=Reason.CACHED, detail="c", attempts=4),
    ])  # fmt: skip
    other = Store.create_or_open(path)
    try:
        assert other.identity() == {"model": "m", "boundaries": [1, 2]}
        assert other.sources() == [SOURCE]
        assert states(other) == {
            0: State.STORED, 1: State.PLANNED, 2: State.FAILED, 3: State.FAILED,
        }  # fmt: skip
        assert list(other.settled_ranges()) == [(0, 1), (2, 4)]
        assert other.attempts() == {1: 3}
        assert next(iter(other.rows())).sample == stored(0, 4096).sample
        (shard,) = other.shards()
        assert (shard.size_bytes, shard.num_samples, shard.is_sealed) == (4196, 1, False)
        assert other.integrity_problems() == []
        totals = other.totals()
        assert totals.by_reason == {Reason.BAD_JSON: 1, Reason.CACHED: 1}
        assert (totals.num_rows, totals.stored_tokens, totals.stored_bytes) == (4, 5, 100)
    finally:
        other.close()


@pytest.mark.parametrize(
    "change",
    [
        Forgotten(ordinal=0),
        retried(1),  # settled
        retried(7),  # never planned
        stored(1, 4096),
        Failed(ordinal=1, reason=Reason.CACHED, detail="", attempts=1),
        rejected(1),
    ],
    ids=lambda change: f"{type(change).__name__}-{change.ordinal}",
)
def test_a_change_that_does_not_follow_is_refused_and_nothing_of_its_batch_stays(
    store: Store, change: Change
) -> None:
    store.apply([planned(0)])
    store.apply(way_to_store(1, 4096))
    before = list(store.rows())
    with pytest.raises(IllegalTransition):
        store.apply([planned(5), change])
    assert list(store.rows()) == before


def test_a_settled_row_is_not_planned_again(store: Store) -> None:
    store.apply(way_to_store(1, 4096))
    before = list(store.rows())
    for key in ("k", "other"):
        with pytest.raises(IllegalTransition, match="row 1 is settled"):
            store.apply([planned(1, key=key)])
    assert list(store.rows()) == before


def test_an_unfinished_row_keeps_its_attempts_when_it_is_planned_again(store: Store) -> None:
    store.apply([planned(0), retried(0, attempts=2)])
    store.apply([planned(0)])
    assert store.attempts() == {0: 2}


def test_an_unfinished_row_that_gives_another_prompt_is_refused(store: Store) -> None:
    store.apply([planned(0)])
    with pytest.raises(PromptChanged, match="row 0 "):
        store.apply([planned(1), planned(0, key="other")])
    store.apply([planned(0)])
    (row,) = store.rows()
    assert (row.prompt, row.state) == (planned(0).prompt, State.PLANNED)


def test_forgotten_samples_are_planned_and_their_shard_is_open(store: Store) -> None:
    store.apply([*way_to_store(0, 4096), *way_to_store(1, 4196), planned(2)])
    store.seal_shard(0, "d")
    store.forget_stored([1])
    with pytest.raises(IllegalTransition):
        store.forget_stored([0, 2])  # 2 is not stored: neither is forgotten
    assert states(store) == {0: State.STORED, 1: State.PLANNED, 2: State.PLANNED}
    (shard,) = store.shards()
    assert (shard.is_sealed, shard.num_samples, shard.size_bytes) == (False, 1, 4196)
    store.apply(way_to_store(1, 4196))
    assert [row.ordinal for row in store.shard_rows(0)] == [0, 1]


def test_forgetting_nothing_opens_no_shard(store: Store) -> None:
    store.apply(way_to_store(0, 4096))
    store.seal_shard(0, "d")
    store.forget_stored([])
    assert store.shards()[0].is_sealed


def test_samples_of_a_shard_come_in_file_order(store: Store) -> None:
    store.apply([*way_to_store(3, 5000), *way_to_store(1, 6000), *way_to_store(2, 4096)])
    assert [row.ordinal for row in store.shard_rows(0)] == [2, 3, 1]


def test_rows_come_in_pages_without_loss(store: Store) -> None:
    for count in (_PAGE_ROWS, 2 * _PAGE_ROWS + 1):  # the last page is full, or not
        store.apply([planned(ordinal) for ordinal in range(count)])
        assert [row.ordinal for row in store.rows()] == list(range(count))
        assert list(store.settled_ranges()) == []


def test_equal_keys_count_as_duplicates(store: Store) -> None:
    store.apply([planned(0, key="same"), stored(0, 4096), planned(1, key="same"), stored(1, 4196)])
    assert store.count_duplicates() == 1


def test_millions_of_keys_are_not_sorted_in_memory(store: Store) -> None:
    """80 MB a million rows, where SQLite is told to keep what is temporary in memory."""
    assert store._db.execute("PRAGMA temp_store").fetchone() == (0,)


def test_a_batch_writes_each_row_once_whatever_it_went_through(store: Store) -> None:
    written: list[int] = []
    store._db.conn.create_function("note", 1, written.append)
    store._db.execute(
        "CREATE TEMP TRIGGER noting BEFORE INSERT ON main.prompts "
        "BEGIN SELECT note(NEW.ordinal); END"
    )
    store.apply([*way_to_store(0, 4096), *way_to_store(1, 4196)])
    assert written == [0, 1]


def test_rows_in_flight_are_not_read_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[list[int]] = []
    real = bulk_write.read_rows

    def noted(connection: sqlite3.Connection, ordinals: list[int]) -> list[Row]:
        read.append(list(ordinals))
        return real(connection, ordinals)

    monkeypatch.setattr(bulk_write, "read_rows", noted)
    for change in [*way_to_store(0, 4096), *way_to_store(1, 4196)]:
        store.apply([change])
    assert read == []
    store.apply([Forgotten(ordinal=0)])  # settled ones are not remembered
    store.apply([retried(0)])
    store.reopen_failed()  # may have changed any row
    store.apply([retried(0)])
    assert read == [[0], [0]]


def test_any_text_comes_back_as_it_was(store: Store) -> None:
    """SQLite's JSON ends a text at a NUL; that one is shown as a symbol."""
    text = "".join(map(chr, range(1, 0x250))) + "\u2028 \U0001f600 \ufeff \\u0000 \\"
    prompt = PromptFacts(
        key=text, num_tokens=5, num_trained=2, alterations=(text.replace(",", ""),)
    )
    place = replace(stored(0, 0).sample, offset=2**53 + 1)
    store.apply([
        Planned(origin=replace(origin(0), label=text), prompt=prompt),
        rejected(1, detail="a\0b"),
        rejected(2, detail=text),
    ])  # fmt: skip
    store.apply([Stored(ordinal=0, sample=place, attempts=1)])
    first, second, third = store.rows()
    assert (first.origin.label, first.prompt, first.sample) == (text, prompt, place)
    assert (second.detail, third.detail) == ("a\u2400b", text)


# --- opening ----------------------------------------------------------------------------------


def test_reading_needs_a_manifest(path: Path) -> None:
    with pytest.raises(ManifestMissing, match=r"no manifest there"):
        Store.open_read_only(path)
    assert not path.exists()


def test_a_reader_sees_commits_of_a_writer_and_cannot_write(store: Store, path: Path) -> None:
    reader = Store.open_read_only(path)
    try:
        store.apply([planned(0)])
        assert states(reader) == {0: State.PLANNED}
        store.apply([stored(0, 4096)])
        assert states(reader) == {0: State.STORED}
        with pytest.raises(ManifestError, match="reading only"):
            reader.apply([planned(1)])
    finally:
        reader.close()


def test_a_manifest_of_a_newer_version_is_refused(store: Store, path: Path) -> None:
    database = Database(sqlite3.connect(path))
    database.table("_sqlite_migrations").insert(
        {"migration_set": "manifest", "name": "m999_future", "applied_at": "2100-01-01"}
    )
    database.conn.commit()
    database.close()
    for opener in (Store.create_or_open, Store.open_read_only):
        with pytest.raises(ManifestError, match=r"newer version .*m999_future"):
            opener(path)


def test_a_manifest_that_was_never_begun_is_not_read(path: Path) -> None:
    sqlite3.connect(path).close()
    path.touch()
    with pytest.raises(ManifestError, match="an empty file"):
        Store.open_read_only(path)


def test_a_file_that_is_no_database_is_named(path: Path) -> None:
    path.write_bytes(b"not a database at all, but long enough to be read as one" * 40)
    for opener in (Store.create_or_open, Store.open_read_only):
        with pytest.raises(ManifestError, match=r"manifest\.sqlite: not a sound manifest"):
            opener(path)


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE VIEW endless AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x FROM n) "
        "SELECT x FROM n",
        "CREATE TRIGGER of_others AFTER INSERT ON prompts BEGIN SELECT 1; END",
        "CREATE VIRTUAL TABLE words USING fts5(x)",
    ],
)
def test_sql_of_others_in_the_schema_is_never_run(store: Store, path: Path, statement: str) -> None:
    store.close()
    connection = sqlite3.connect(path)
    connection.execute(statement)
    connection.close()
    for open_store in (Store.open_read_only, Store.create_or_open):
        with pytest.raises(ManifestDamaged, match="not a sound manifest"):
            open_store(path)


def test_a_full_disk_is_told_and_what_was_committed_stays(store: Store, path: Path) -> None:
    store.apply([planned(0)])
    store._db.execute("PRAGMA max_page_count = 20")
    with pytest.raises(ManifestSpaceError, match=r"no space left .*SQLITE_FULL"):
        store.apply([planned(ordinal) for ordinal in range(1, 5000)])
    assert states(store) == {0: State.PLANNED}
    store._db.execute("PRAGMA max_page_count = 1000000")
    store.apply([planned(ordinal) for ordinal in range(1, 5000)])
    assert len(states(store)) == 5000


def test_damage_is_found_by_the_check(store: Store, path: Path) -> None:
    store.apply([planned(ordinal) for ordinal in range(2000)])
    store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store.close()
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        file.write(b"\xff" * 4096)
    reader = Store.open_read_only(path)
    try:
        problems: list[str] = []
        try:
            problems = reader.integrity_problems()
        except ManifestError as error:
            problems = [str(error)]
        assert problems
    finally:
        reader.close()


def test_a_manifest_of_the_first_version_is_brought_up_to_date(path: Path) -> None:
    database = Database(sqlite3.connect(path, isolation_level=None))
    migrations.apply(database, stop_before="m002_tallies")
    database.execute("INSERT INTO sources VALUES (0, 'p', 1, 'd', 3)")
    database.execute(
        "INSERT INTO shards (number, name, data_start) VALUES (0, 'shard-000000.safetensors', 4096)"
    )
    columns = (
        "ordinal, source, line, key, num_tokens, num_trained, state, shard, offset, size_bytes, "
        "digest, reason"
    )
    for values in (
        (0, 0, 1, "a", 5, 0, "stored", 0, 4096, 100, "x", None),
        (1, 0, 2, "b", 7, 2, "stored", 0, 4196, 100, "x", None),
        (2, 0, 3, None, None, None, "failed", None, None, None, None, "bad_json"),
    ):
        marks = ", ".join("?" * len(values))
        database.execute(f"INSERT INTO prompts ({columns}) VALUES ({marks})", values)
    database.close()
    before = path.read_bytes()
    # Read as a copy of this version; brought up to date by who may write.
    for opened in (Store.open_read_only, Store.create_or_open):
        store = opened(path)
        totals = store.totals()
        assert (totals.by_state, totals.by_reason) == (
            {State.STORED: 2, State.FAILED: 1}, {Reason.BAD_JSON: 1},
        )  # fmt: skip
        assert (totals.stored_tokens, totals.stored_bytes, totals.untrained) == (12, 200, 1)
        (shard,) = store.shards()
        assert (shard.num_samples, shard.size_bytes, shard.digest) == (2, 4296, None)
        assert store.integrity_problems() == []
        store.close()
        assert (path.read_bytes() == before) is (opened == Store.open_read_only)


def test_a_manifest_with_triggers_goes_on_without(path: Path) -> None:
    database = Database(sqlite3.connect(path, isolation_level=None))
    migrations.apply(database, stop_before="m004_tallies_by_batch")
    database.execute("INSERT INTO sources VALUES (0, 'p', 1, 'd', 3)")
    database.execute(
        "INSERT INTO shards (number, name, data_start) VALUES (0, 'shard-000000.safetensors', 4096)"
    )
    for ordinal in range(3):
        database.execute(
            "INSERT INTO prompts (ordinal, source, line, key, num_tokens, state, num_deaths) "
            "VALUES (?, 0, 1, ?, 5, 'planned', 1)", (ordinal, f"k{ordinal}"),
        )  # fmt: skip
    database.execute("UPDATE prompts SET state = 'sent' WHERE ordinal = 1")
    database.close()
    store = Store.create_or_open(path)
    store.apply([*way_to_store(0, 4096), Lost(ordinal=2, attempts=1)])
    assert store.totals().by_state == {State.STORED: 1, State.PLANNED: 2}
    assert (store.shards()[0].num_samples, store.shards()[0].size_bytes) == (1, 4196)
    assert store.suspects() == {1: 1, 2: 2}
    assert store.integrity_problems() == []
    store.close()


def six_states(path: Path) -> None:
    """A manifest of schema m006 with a row in each of its states, and one with a wrong checksum."""
    database = Database(sqlite3.connect(path, isolation_level=None))
    migrations.apply(database, stop_before="m007_three_states")
    database.execute("INSERT INTO sources VALUES (0, 'p', 1, 'd', 8, NULL)")
    database.execute(
        "INSERT INTO shards (number, name, data_start, end_bytes, num_samples) "
        "VALUES (0, 'shard-000000.safetensors', 4096, 4196, 1)"
    )
    for ordinal, state in enumerate(
        ("planned", "sent", "dumped", "verified", "sent", "stored", "failed")
    ):
        row: dict[str, object] = {
            "ordinal": ordinal, "source": 0, "line": ordinal + 1, "key": f"k{ordinal}",
            "num_tokens": 5, "num_trained": ordinal % 2, "state": state, "attempts": ordinal,
            "num_deaths": int(state == "sent"),
        }  # fmt: skip
        if state == "stored":
            row |= {"shard": 0, "offset": 4096, "size_bytes": 100, "digest": "x", "num_pieces": 1}
        if state == "failed":
            row |= {"reason": "cached", "detail": "why"}
        names = sorted(row)
        checksum = row_checksum(names, [row[name] for name in names])
        row["checksum"] = checksum + (ordinal == 4)
        database.table("prompts").insert(row)
    bulk_write.count_again(database.conn)
    database.close()


def test_rows_in_flight_of_an_older_version_are_planned(path: Path) -> None:
    six_states(path)
    before = path.read_bytes()
    for opened in (Store.open_read_only, Store.create_or_open):
        store = opened(path)
        rows = [row for row in store.checked_rows() if not isinstance(row, Damage)]
        assert {row.ordinal: (row.state, row.attempts, row.num_deaths) for row in rows} == {
            0: (State.PLANNED, 0, 0),
            1: (State.PLANNED, 1, 1),
            2: (State.PLANNED, 2, 0),
            3: (State.PLANNED, 3, 0),
            5: (State.STORED, 5, 0),
            6: (State.FAILED, 6, 0),
        }
        # What was damaged before is still detected.
        (damaged,) = (row for row in store.checked_rows() if isinstance(row, Damage))
        assert (damaged.place, damaged.detail) == (4, "its checksum is not that of its columns")
        checksums = store._db.execute("SELECT COUNT(checksum) FROM prompts").fetchone()
        assert checksums == (7,)
        assert store.totals().by_state == {State.PLANNED: 5, State.STORED: 1, State.FAILED: 1}
        assert store.tally_problems() == []
        assert store.integrity_problems() == []
        assert list(store.settled_ranges()) == [(5, 7)]
        assert store.attempts() == {1: 1, 2: 2, 3: 3, 4: 4}
        store.close()
        assert (path.read_bytes() == before) is (opened == Store.open_read_only)


def test_a_damaged_row_that_is_loaded_is_named(path: Path) -> None:
    six_states(path)
    store = Store.create_or_open(path)
    with pytest.raises(ManifestDamaged, match=r"row 4: its checksum is not .*`extractor verify`"):
        store.apply([retried(4)])
    store.close()


def test_an_old_sqlite_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))
    for opener in (Store.create_or_open, Store.open_read_only):
        with pytest.raises(ManifestError, match=r"needs 3\.37\.0\. Use a Python"):
            opener(path)
    assert not path.exists()


def test_settled_rows_are_told_where_some_are_missing_too(store: Store) -> None:
    store.apply([*way_to_store(1, 4096), planned(2), *way_to_store(4, 4196)])
    assert list(store.settled_ranges()) == [(1, 2), (4, 5)]
    store.apply([*way_to_store(0, 4296), *way_to_store(3, 4396)])
    assert list(store.settled_ranges()) == [(0, 2), (3, 5)]


def test_a_closed_manifest_is_one_plain_file(store: Store, path: Path) -> None:
    store.apply([planned(0)])
    assert len(list(path.parent.iterdir())) == 3
    store.close()
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "query",
    [
        f"SELECT ordinal FROM prompts WHERE {UNFINISHED} AND ordinal > 5 ORDER BY ordinal LIMIT 9",
        f"SELECT ordinal, attempts FROM prompts WHERE {UNFINISHED} AND attempts > 0",
        "SELECT ordinal FROM prompts WHERE state = 'failed' AND ordinal > 5 ORDER BY ordinal",
    ],
)
def test_what_every_start_asks_for_needs_no_scan(store: Store, query: str) -> None:
    plan = " ".join(row[3] for row in store._db.execute(f"EXPLAIN QUERY PLAN {query}"))
    assert "prompts_unfinished" in plan or "prompts_failed" in plan


def test_every_commit_is_on_the_disk_before_it_returns(store: Store) -> None:
    ((mode,),) = store._db.execute("PRAGMA journal_mode").fetchall()
    ((synchronous,),) = store._db.execute("PRAGMA synchronous").fetchall()
    assert (mode, synchronous) == ("wal", 2)  # FULL

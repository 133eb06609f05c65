"""Defines the manifest's tables as migrations. Never edit a migration that has shipped.

`sources`  the input files                      `prompts`  one row per input row
`identity` of the data set, name and JSON       `shards`   one row per shard file
`server_starts` each server start that a session extracted from, and the facts that it announced
`canaries` states of the canary prompt, the reference for later server starts
`tallies`  rows, tokens and bytes by state and reason, so that totals need no scan of all rows

The writer updates the tallies and the shards' sample totals in the transaction that changes the
rows (see bulk_write.py); `extractor verify` compares them with the rows.
"""

from __future__ import annotations

from collections.abc import Callable

from sqlite_utils import Database, Migrations

from manifest.decoding import row_checksum

migrations = Migrations("manifest")


@migrations()
def m001_initial(db: Database) -> None:
    for statement in (
        """
        CREATE TABLE identity (
            name TEXT PRIMARY KEY,
            value TEXT NOT NULL              -- JSON
        ) STRICT, WITHOUT ROWID
        """,
        """
        CREATE TABLE sources (
            number INTEGER PRIMARY KEY,
            path TEXT NOT NULL,
            size_bytes INTEGER NOT NULL,
            digest TEXT NOT NULL,
            num_rows INTEGER NOT NULL
        ) STRICT
        """,
        """
        CREATE TABLE shards (
            number INTEGER PRIMARY KEY,
            name TEXT NOT NULL UNIQUE,
            data_start INTEGER NOT NULL,
            is_sealed INTEGER NOT NULL DEFAULT 0
        ) STRICT
        """,
        """
        CREATE TABLE prompts (
            ordinal INTEGER PRIMARY KEY,
            source INTEGER NOT NULL REFERENCES sources (number),
            line INTEGER NOT NULL,
            label TEXT,
            key TEXT,
            num_tokens INTEGER,
            num_trained INTEGER,
            state TEXT NOT NULL,
            reason TEXT,
            detail TEXT,
            attempts INTEGER NOT NULL DEFAULT 0,
            shard INTEGER REFERENCES shards (number),
            offset INTEGER,
            size_bytes INTEGER,
            digest TEXT,
            num_pieces INTEGER,
            CHECK ((state = 'failed') = (reason IS NOT NULL)),
            CHECK ((state = 'stored') = (shard IS NOT NULL AND offset IS NOT NULL
                   AND size_bytes IS NOT NULL AND digest IS NOT NULL AND key IS NOT NULL))
        ) STRICT
        """,
        # The samples of a shard in file order: sealing, verify and export read them so.
        "CREATE INDEX prompts_by_place ON prompts (shard, offset) WHERE shard IS NOT NULL",
    ):
        db.execute(statement)


@migrations()
def m002_tallies(db: Database) -> None:
    tally = """
        num_rows = num_rows {sign} 1,
        num_tokens = num_tokens {sign} COALESCE({row}.num_tokens, 0),
        size_bytes = size_bytes {sign} COALESCE({row}.size_bytes, 0),
        num_untrained = num_untrained {sign} COALESCE({row}.num_trained = 0, 0)
    """
    add = f"""
        INSERT INTO tallies VALUES (NEW.state, COALESCE(NEW.reason, ''), 1,
            COALESCE(NEW.num_tokens, 0), COALESCE(NEW.size_bytes, 0),
            COALESCE(NEW.num_trained = 0, 0))
        ON CONFLICT (state, reason) DO UPDATE SET {tally.format(sign="+", row="NEW")};
    """
    subtract = f"""
        UPDATE tallies SET {tally.format(sign="-", row="OLD")}
        WHERE state = OLD.state AND reason = COALESCE(OLD.reason, '');
    """
    for statement in (
        # How often the server died with the row's request unanswered.
        "ALTER TABLE prompts ADD COLUMN num_deaths INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE shards ADD COLUMN digest TEXT",  # of a sealed one
        "ALTER TABLE shards ADD COLUMN end_bytes INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE shards ADD COLUMN num_samples INTEGER NOT NULL DEFAULT 0",
        """
        UPDATE shards SET
            end_bytes = COALESCE(
                (SELECT MAX(offset + size_bytes) FROM prompts WHERE shard = number), data_start),
            num_samples = (SELECT COUNT(*) FROM prompts WHERE shard = number)
        """,
        """
        CREATE TABLE tallies (
            state TEXT NOT NULL,
            reason TEXT NOT NULL,            -- '' unless failed
            num_rows INTEGER NOT NULL,
            num_tokens INTEGER NOT NULL,
            size_bytes INTEGER NOT NULL,
            num_untrained INTEGER NOT NULL,  -- rows without a trained token
            PRIMARY KEY (state, reason)
        ) STRICT, WITHOUT ROWID
        """,
        """
        INSERT INTO tallies
        SELECT state, COALESCE(reason, ''), COUNT(*), COALESCE(SUM(num_tokens), 0),
            COALESCE(SUM(size_bytes), 0), COALESCE(SUM(num_trained = 0), 0)
        FROM prompts GROUP BY 1, 2
        """,
        # Few rows are in these at any time, so they cost little and save the scan of all.
        "CREATE INDEX prompts_unfinished ON prompts (ordinal) "
        "WHERE state NOT IN ('stored', 'failed')",
        "CREATE INDEX prompts_failed ON prompts (ordinal) WHERE state = 'failed'",
        f"CREATE TRIGGER tallies_insert AFTER INSERT ON prompts BEGIN {add} END",
        f"CREATE TRIGGER tallies_delete AFTER DELETE ON prompts BEGIN {subtract} END",
        "CREATE TRIGGER tallies_update AFTER UPDATE OF state, reason, num_tokens, num_trained, "
        f"size_bytes ON prompts BEGIN {subtract} {add} END",
        """
        CREATE TRIGGER shards_enter AFTER UPDATE OF shard ON prompts WHEN NEW.shard IS NOT NULL
        BEGIN
            UPDATE shards SET num_samples = num_samples + 1,
                end_bytes = MAX(end_bytes, NEW.offset + NEW.size_bytes)
            WHERE number = NEW.shard;
        END
        """,
        """
        CREATE TRIGGER shards_leave AFTER UPDATE OF shard ON prompts WHEN OLD.shard IS NOT NULL
        BEGIN
            UPDATE shards SET num_samples = num_samples - 1,
                end_bytes = COALESCE(
                    (SELECT offset + size_bytes FROM prompts WHERE shard = OLD.shard
                     ORDER BY offset DESC LIMIT 1), data_start)
            WHERE number = OLD.shard;
        END
        """,
    ):
        db.execute(statement)


@migrations()
def m003_parts_and_alterations(db: Database) -> None:
    for statement in (
        "ALTER TABLE prompts ADD COLUMN part INTEGER",
        "ALTER TABLE prompts ADD COLUMN alterations TEXT",  # separated by commas
        # Few rows have any, so counting them reads few.
        "CREATE INDEX prompts_altered ON prompts (state, alterations) "
        "WHERE alterations IS NOT NULL",
    ):
        db.execute(statement)


@migrations()
def m004_tallies_by_batch(db: Database) -> None:
    # A trigger on each row cost more than the row. The writer does it once for a batch.
    for name in (
        "tallies_insert", "tallies_delete", "tallies_update", "shards_enter", "shards_leave",
    ):  # fmt: skip
        db.execute(f"DROP TRIGGER {name}")


@migrations()
def m005_server_starts(db: Database) -> None:
    for statement in (
        """
        CREATE TABLE server_starts (
            number INTEGER PRIMARY KEY,
            session INTEGER NOT NULL,
            used_at TEXT NOT NULL,           -- ISO 8601, UTC
            url TEXT NOT NULL,
            boot_id TEXT NOT NULL,
            facts TEXT NOT NULL,             -- JSON object
            canary_error REAL,               -- NULL: there was none to compare with
            accepted TEXT NOT NULL,          -- JSON array: facts that were let change
            checksum INTEGER NOT NULL        -- of all other columns: decoding.py
        ) STRICT
        """,
        """
        CREATE TABLE canaries (
            server INTEGER PRIMARY KEY REFERENCES server_starts (number),
            dump BLOB NOT NULL,              -- as in server_patch/dump_format.py
            digest TEXT NOT NULL             -- xxh3-128 of the dump
        ) STRICT
        """,
        # NULL for rows that an older version stored.
        "ALTER TABLE prompts ADD COLUMN server INTEGER REFERENCES server_starts (number)",
    ):
        db.execute(statement)


@migrations()
def m006_checksums(db: Database) -> None:
    # A checksum of the other columns (see decoding.py). It protects what the shards cannot prove,
    # such as a label or a line number.
    for table, columns in (
        (
            "prompts",
            "alterations attempts detail digest key label line num_deaths num_pieces num_tokens "
            "num_trained offset ordinal part reason server shard size_bytes source state",
        ),
        ("sources", "digest num_rows number path size_bytes"),
        ("identity", "name value"),
    ):
        names = columns.split()
        db.execute(f"ALTER TABLE {table} ADD COLUMN checksum INTEGER")
        db.conn.create_function(
            f"checksum_of_{table}", len(names), _checksum_of(names), deterministic=True
        )
        db.execute(f"UPDATE {table} SET checksum = checksum_of_{table}({', '.join(names)})")


@migrations()
def m007_three_states(db: Database) -> None:
    # Prompts that were in flight when a session ended are sent again: they are planned.
    names = (
        "alterations attempts detail digest key label line num_deaths num_pieces num_tokens "
        "num_trained offset ordinal part reason server shard size_bytes source state"
    ).split()
    in_flight = "state IN ('sent', 'dumped', 'verified')"
    now = ", ".join("'planned'" if name == "state" else name for name in names)
    db.conn.create_function(
        "checksum_of_prompts", len(names), _checksum_of(names), deterministic=True
    )
    # A wrong checksum stays wrong, so that the damage is still detected.
    db.execute(
        f"UPDATE prompts SET state = 'planned', checksum = CASE checksum "
        f"WHEN checksum_of_prompts({', '.join(names)}) THEN checksum_of_prompts({now}) "
        f"ELSE checksum END WHERE {in_flight}"
    )
    for statement in (
        """
        CREATE TABLE new_tallies (
            state TEXT NOT NULL CHECK (state IN ('planned', 'stored', 'failed')),
            reason TEXT NOT NULL,            -- '' unless failed
            num_rows INTEGER NOT NULL,
            num_tokens INTEGER NOT NULL,
            size_bytes INTEGER NOT NULL,
            num_untrained INTEGER NOT NULL,  -- rows without a trained token
            PRIMARY KEY (state, reason)
        ) STRICT, WITHOUT ROWID
        """,
        f"""
        INSERT INTO new_tallies
        SELECT iif({in_flight}, 'planned', state), reason,
            SUM(num_rows), SUM(num_tokens), SUM(size_bytes), SUM(num_untrained)
        FROM tallies WHERE {in_flight} OR state IN ('planned', 'stored', 'failed') GROUP BY 1, 2
        """,
        "DROP TABLE tallies",
        "ALTER TABLE new_tallies RENAME TO tallies",
    ):
        db.execute(statement)


def _checksum_of(names: list[str]) -> Callable[..., int]:
    return lambda *values: row_checksum(names, values)

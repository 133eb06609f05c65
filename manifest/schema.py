"""The manifest's tables, by migrations. A migration that has shipped is never edited.

`sources`  the input files                      `prompts`  one row an input row
`identity` what the data set is of, name/JSON   `shards`   one row a shard file
"""

from __future__ import annotations

from sqlite_utils import Database, Migrations

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
def m002_parts_and_alterations(db: Database) -> None:
    for statement in (
        "ALTER TABLE prompts ADD COLUMN part INTEGER",
        "ALTER TABLE prompts ADD COLUMN alterations TEXT",  # separated by commas
    ):
        db.execute(statement)

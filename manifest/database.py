"""Opening the manifest's file, and SQLite's errors in our words.

Durability: WAL with `synchronous=FULL`. A commit is on the disk before it returns, which the
client needs: it unlinks a dump only after the commit that says where its copy lies. (With NORMAL
a power cut may drop the last commits, and a dropped one whose dump is gone is a lost sample.)
Its cost, one fsync a commit, is shared by everything that a commit holds.
"""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlite_utils import Database

from manifest.decoding import shown
from manifest.errors import (
    ManifestDamaged,
    ManifestError,
    ManifestMissing,
    ManifestSpaceError,
)
from manifest.schema import migrations

#: STRICT tables need 3.37; UPDATE FROM and what else is used is older.
MIN_SQLITE = (3, 37, 0)


def open_for_writing(path: Path) -> Database:
    """Make the file and its tables where they are missing. Raises ManifestError."""
    _require_sqlite()
    with explained(path):
        connection = sqlite3.connect(path, isolation_level=None)
        connection.text_factory = _text
        database = Database(connection)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        database.execute("PRAGMA foreign_keys = ON")
        # Bounds the WAL file after a burst; no reader here holds a cursor open for long.
        database.execute("PRAGMA journal_size_limit = 67108864")
        _check_version(database, path)
        migrations.apply(database)
        return database


def open_for_reading(path: Path) -> Database:
    """Open also while another process writes. Raises ManifestMissing, ManifestError."""
    _require_sqlite()
    if not path.exists():
        raise ManifestMissing(
            f"{path}: no manifest there. Name the directory given to `extractor run --out`."
        )
    if not path.is_file():
        raise damaged(path, "not a regular file")
    if not (size := path.stat().st_size):
        raise ManifestMissing(
            f"{path} is an empty file: no data set was begun there, or its manifest was lost."
        )
    if size < 100:  # SQLite takes it for an empty one
        raise damaged(path, f"{size} bytes are less than its header has")
    with explained(path):
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None
        )
        try:
            connection.text_factory = _text
            database = Database(connection)
            if pending := _check_version(database, path):
                if schema_of(database) == expected_schema():
                    raise damaged(path, f"no record of {', '.join(sorted(pending))}")
                raise ManifestError(
                    f"{path}: the manifest is older than this tool or was never begun. "
                    "`extractor run` brings it up to date."
                )
        except BaseException:
            connection.close()
            raise
        return database


def _text(data: bytes) -> str | bytes:
    """Text, or the bytes where they are not UTF-8: whoever gets them says which value it is."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _require_sqlite() -> None:
    if sqlite3.sqlite_version_info < MIN_SQLITE:
        raise ManifestError(
            f"the SQLite of this Python is {sqlite3.sqlite_version}; the manifest needs "
            f"{'.'.join(map(str, MIN_SQLITE))}. Use a Python that was built with a newer one."
        )


def _check_version(database: Database, path: Path) -> set[str]:
    """The migrations that the file lacks. Raises ManifestError where it has some of a newer
    version."""
    known = {migration.name for migration in migrations.pending(Database(memory=True))}
    # Not by the library, which relies on the columns of its table.
    table = migrations.migrations_table
    applied = set()
    if database.execute("SELECT 1 FROM sqlite_schema WHERE name = ?", [table]).fetchall():
        rows = database.execute(f"SELECT name FROM {table} WHERE migration_set = 'manifest'")
        applied = {name if isinstance(name, str) else shown(name) for (name,) in rows.fetchall()}
    if not (unknown := applied - known):
        return known - applied
    if known - applied:
        # A newer version has all of ours and more.
        raise damaged(path, f"unknown migrations: {', '.join(sorted(unknown))}")
    raise ManifestError(
        f"{path}: written by a newer version of this tool (has {', '.join(sorted(unknown))}). "
        "Upgrade hidden-state-extractor."
    )


def schema_of(database: Database) -> dict[str, str]:
    """The statement that made each table, index and trigger of this tool."""
    rows = database.execute(
        "SELECT name, sql FROM sqlite_schema WHERE sql IS NOT NULL "
        "AND name NOT LIKE '%sqlite^_%' ESCAPE '^'"
    ).fetchall()
    return {str(name): str(sql) for name, sql in rows}


@functools.cache
def expected_schema() -> dict[str, str]:
    """The same of a new manifest. Migrations add to each other's text and nothing else does."""
    database = Database(memory=True)
    migrations.apply(database)
    schema = schema_of(database)
    database.close()
    return schema


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """SQLite's errors as ManifestErrors that name the file and what to do."""
    try:
        yield
    except UnicodeDecodeError as error:  # from within sqlite3: a message quotes what it read
        raise damaged(path, shown(error.object)) from error
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorname", None)
        if code == "SQLITE_FULL" or (code or "").startswith("SQLITE_IOERR"):
            raise ManifestSpaceError(
                f"{path}: the manifest's disk is full or failing ({error}). "
                "Free space and run the same command again."
            ) from error
        if is_damage(error):
            raise damaged(path, str(error)) from error
        raise ManifestError(f"{path}: {error} ({code})") from error


#: SQLite's result codes for what the file holds, by their beginnings. Every statement here is known
#: to be right, so that one which a file does not take says that its schema is another.
_DAMAGE = (
    "SQLITE_NOTADB", "SQLITE_CORRUPT", "SQLITE_ERROR", "SQLITE_SCHEMA", "SQLITE_FORMAT",
    "SQLITE_TOOBIG", "SQLITE_NOMEM", "SQLITE_INTERRUPT", "SQLITE_MISMATCH", "SQLITE_RANGE",
)  # fmt: skip


def is_damage(error: sqlite3.Error) -> bool:
    """Whether an error is the fault of the file's content, not of the file system or a defect."""
    code = getattr(error, "sqlite_errorname", None)
    if code is None:  # raised by Python's module, for text that is not UTF-8
        return isinstance(error, sqlite3.OperationalError)
    return str(code).startswith(_DAMAGE)


def damaged(path: Path, what: str) -> ManifestDamaged:
    return ManifestDamaged(
        f"{path}: not a sound manifest ({what}). Restore it from a copy, or use a new --out."
    )

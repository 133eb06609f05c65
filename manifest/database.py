"""Opening the manifest's file, and SQLite's errors in our words.

Durability: WAL with `synchronous=FULL`. A commit is on the disk before it returns, which the
client needs: it unlinks a dump only after the commit that says where its copy lies. (With NORMAL
a power cut may drop the last commits, and a dropped one whose dump is gone is a lost sample.)
Its cost, one fsync a commit, is shared by everything that a commit holds.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlite_utils import Database

from manifest.errors import ManifestError, ManifestMissing, ManifestSpaceError
from manifest.schema import migrations

#: STRICT tables need 3.37; UPDATE FROM and what else is used is older.
MIN_SQLITE = (3, 37, 0)


def open_for_writing(path: Path) -> Database:
    """Make the file and its tables where they are missing. Raises ManifestError."""
    _require_sqlite()
    with explained(path):
        database = Database(sqlite3.connect(path, isolation_level=None))
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
    if not path.is_file():
        raise ManifestMissing(
            f"{path}: no manifest there. Name the directory given to `extractor run --out`."
        )
    if not path.stat().st_size:
        raise ManifestMissing(
            f"{path} is an empty file: no data set was begun there, or its manifest was lost."
        )
    with explained(path):
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None
        )
        database = Database(connection)
        _check_version(database, path)
        if migrations.pending(database):
            raise ManifestError(
                f"{path}: the manifest is older than this tool or was never begun. "
                "`extractor run` brings it up to date."
            )
        return database


def _require_sqlite() -> None:
    if sqlite3.sqlite_version_info < MIN_SQLITE:
        raise ManifestError(
            f"the SQLite of this Python is {sqlite3.sqlite_version}; the manifest needs "
            f"{'.'.join(map(str, MIN_SQLITE))}. Use a Python that was built with a newer one."
        )


def _check_version(database: Database, path: Path) -> None:
    known = {migration.name for migration in migrations.pending(Database(memory=True))}
    unknown = {migration.name for migration in migrations.applied(database)} - known
    if unknown:
        raise ManifestError(
            f"{path}: written by a newer version of this tool (has {', '.join(sorted(unknown))}). "
            "Upgrade hidden-state-extractor."
        )


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """SQLite's errors as ManifestErrors that name the file and what to do."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorname", None)
        if code == "SQLITE_FULL" or (code or "").startswith("SQLITE_IOERR"):
            raise ManifestSpaceError(
                f"{path}: the manifest's disk is full or failing ({error}). "
                "Free space and run the same command again."
            ) from error
        if code in ("SQLITE_NOTADB", "SQLITE_CORRUPT"):
            raise ManifestError(
                f"{path}: not a sound manifest ({error}). "
                "Restore it from a copy, or use a new --out."
            ) from error
        raise ManifestError(f"{path}: {error} ({code})") from error

"""Opens the manifest's file, and explains SQLite's errors.

WAL with `synchronous=FULL`: a commit is on the disk before it returns, as the client unlinks dumps
after it. (With NORMAL, a power cut may drop the last commits.) It costs one fsync per commit.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from sqlite_utils import Database

from manifest.causes import LIMIT_ERRNOS, NO_LOCKS_ERRNOS, cause_of, named
from manifest.decoding import shown
from manifest.exceptions import (
    ManifestDamaged,
    ManifestError,
    ManifestMissing,
    ManifestSpaceError,
)
from manifest.schema import migrations
from server_patch.directory import Directory, UnsafeFile

#: STRICT tables need 3.37; everything else is older.
MIN_SQLITE = (3, 37, 0)


def open_for_writing(path: Path, *, file_mode: int) -> Database:
    """Open the file; create it and its tables if they are missing. Raises ManifestError.

    file_mode: permission bits of a new file; SQLite gives them to its companions, too.
    """
    _require_sqlite()
    with explained(path):
        with _opened_directory(path) as directory:
            _require_safe_companions(directory, path, mode="rw")
            if not directory.exists(path.name):
                os.close(directory.create(path.name, mode=file_mode))
            connection = _connected(directory, path, mode="rw")
        database = Database(connection)
        _require_own_schema(database, path)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        database.execute("PRAGMA foreign_keys = ON")
        # Bounds the WAL file after a burst; no reader here holds a cursor open for long.
        database.execute("PRAGMA journal_size_limit = 67108864")
        _check_version(database, path)
        migrations.apply(database)
        return database


def open_for_reading(path: Path) -> Database:
    """Open for reading, also during writes. Raises ManifestMissing, ManifestError."""
    _require_sqlite()
    with explained(path):
        with _opened_directory(path) as directory:
            if not directory.exists(path.name):
                raise _missing(path)
            if directory.is_regular(path.name):
                _require_content(path, directory.stat(path.name).st_size)
            _require_safe_companions(directory, path, mode="ro")
            connection = _connected(directory, path, mode="ro")
        try:
            database = Database(connection)
            _require_own_schema(database, path)
            if pending := _check_version(database, path):
                if schema_of(database) == expected_schema():
                    raise damaged(path, f"no record of {', '.join(sorted(pending))}")
                return _migrated_copy(connection)
        except BaseException:
            connection.close()
            raise
        return database


@contextmanager
def _opened_directory(path: Path) -> Iterator[Directory]:
    try:
        directory = Directory.open(path.parent)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _missing(path) from error
    with directory:
        yield directory


def _missing(path: Path) -> ManifestMissing:
    return ManifestMissing(
        f"{path}: no manifest there. Name the directory given to `extractor run --out`."
    )


def _require_content(path: Path, size: int) -> None:
    if not size:
        raise ManifestMissing(
            f"{path} is an empty file: no data set was begun there, or its manifest was lost."
        )
    if size < 100:  # SQLite treats it as an empty database
        raise damaged(path, f"{size} bytes are less than its header has")


def _connected(directory: Directory, path: Path, *, mode: str) -> sqlite3.Connection:
    """Connect to the regular file `path` of `directory`. Raises ManifestDamaged for anything else.

    SQLite opens files by their paths. So the file is looked at before, and the one that SQLite has
    opened must be the same, before anything is read from it or written to it. Its companions SQLite
    opens later, by itself, without following links. What remains is a user who may write to the
    directory and puts a pipe or another file's second name in place of a companion between the look
    at it and its use: SQLite would wait, or write there. For that, keep OUT to yourself.
    """
    facts = _regular(directory, path.name, mode=mode)
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None
    )
    if (facts.st_dev, facts.st_ino) not in _open_files():
        connection.close()
        raise damaged(path, "another file was put in its place meanwhile")
    connection.text_factory = _text
    # A function that a foreign schema names has no effect outside of the file.
    connection.execute("PRAGMA trusted_schema = OFF")
    return connection


def _open_files() -> set[tuple[int, int]]:
    """Device and inode of every file that this process has open."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing
            facts = os.fstat(int(descriptor))
            found.add((facts.st_dev, facts.st_ino))
    return found


def _require_own_schema(database: Database, path: Path) -> None:
    """Raise ManifestDamaged for SQL in the schema that no version of this tool wrote.

    The query of a view and the body of a trigger run with our statements, and may never end.
    """
    rows = database.execute("SELECT type, name, sql FROM sqlite_schema").fetchall()
    for kind, name, sql in rows:
        is_virtual = kind == "table" and str(sql).upper().startswith("CREATE VIRTUAL")
        if kind not in ("table", "index", "trigger") or is_virtual:
            raise damaged(path, f"it has a {'virtual table' if is_virtual else shown(kind)}")
        if kind == "trigger" and str(sql) not in _known_triggers():
            raise damaged(path, f"a trigger of another origin: {shown(name)}")


@functools.cache
def _known_triggers() -> set[str]:
    """The statements of all triggers that some version of the manifest has."""
    database = Database(memory=True)
    found: set[str] = set()
    for migration in migrations.pending(database):
        migrations.apply(database, stop_before=migration.name)
        rows = database.execute("SELECT sql FROM sqlite_schema WHERE type = 'trigger'").fetchall()
        found |= {str(sql) for (sql,) in rows}
    database.close()
    return found


def _migrated_copy(connection: sqlite3.Connection) -> Database:
    """Migrate a copy of an older manifest, in a temporary file that SQLite removes on closing.

    A reader must not change the file itself. Closes `connection`.
    """
    copy = sqlite3.connect("", isolation_level=None)
    try:
        connection.backup(copy)
        copy.text_factory = _text
        database = Database(copy)
        migrations.apply(database)
    except BaseException:
        copy.close()
        raise
    connection.close()
    return database


def _require_safe_companions(directory: Directory, path: Path, *, mode: str) -> None:
    """Raise ManifestDamaged for a companion that is not a regular file, or has a second name:
    SQLite would wait at a pipe, or write to the other file, even a reader."""
    for suffix in ("-journal", "-wal", "-shm"):
        if directory.exists(name := path.name + suffix):
            facts = _regular(directory, name, mode=mode)
            if facts.st_nlink > 1:
                raise damaged(directory.path / name, "has a second name elsewhere")


def _regular(directory: Directory, name: str, *, mode: str) -> os.stat_result:
    """The facts of a regular file; of ours, to write to it. Raises ManifestDamaged."""
    facts = directory.stat(name)
    try:
        if mode == "rw":
            directory.require_ours(facts, name)
    except UnsafeFile as error:
        raise damaged(directory.path / name, str(error.strerror)) from error
    if not stat.S_ISREG(facts.st_mode):
        raise damaged(directory.path / name, "not a regular file")
    return facts


def _text(data: bytes) -> str | bytes:
    """Decode UTF-8; return invalid bytes as they are, so that the caller can report the value."""
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
    """The migrations that the file lacks. Raises ManifestError if it has unknown migrations."""
    known = {migration.name for migration in migrations.pending(Database(memory=True))}
    # Query the table directly: the library relies on its columns, which may be damaged.
    table = migrations.migrations_table
    applied = set()
    if database.execute("SELECT 1 FROM sqlite_schema WHERE name = ?", [table]).fetchall():
        rows = database.execute(f"SELECT name FROM {table} WHERE migration_set = 'manifest'")
        applied = {name if isinstance(name, str) else shown(name) for (name,) in rows.fetchall()}
    if not (unknown := applied - known):
        return known - applied
    if known - applied:
        # A file of a newer version would have all of our migrations, too.
        raise damaged(path, f"unknown migrations: {', '.join(sorted(unknown))}")
    raise ManifestError(
        f"{path}: written by a newer version of this tool (has {', '.join(sorted(unknown))}). "
        "Upgrade hidden-state-extractor."
    )


def schema_of(database: Database) -> dict[str, str]:
    """Name -> CREATE statement of each table, index and trigger in the file."""
    rows = database.execute(
        "SELECT name, sql FROM sqlite_schema WHERE sql IS NOT NULL "
        "AND name NOT LIKE '%sqlite^_%' ESCAPE '^'"
    ).fetchall()
    return {str(name): str(sql) for name, sql in rows}


@functools.cache
def expected_schema() -> dict[str, str]:
    """The schema of a new manifest, from the migrations alone."""
    database = Database(memory=True)
    migrations.apply(database)
    schema = schema_of(database)
    database.close()
    return schema


#: Prefix of a SQLite result code -> the errno behind it. The first matching prefix counts.
_ERRNOS: Final[tuple[tuple[str, int], ...]] = (
    ("SQLITE_FULL", errno.ENOSPC),
    ("SQLITE_NOMEM", errno.ENOMEM),
    ("SQLITE_IOERR_NOMEM", errno.ENOMEM),
    ("SQLITE_IOERR_LOCK", errno.ENOLCK),
    ("SQLITE_IOERR_RDLOCK", errno.ENOLCK),
    ("SQLITE_IOERR_UNLOCK", errno.ENOLCK),
    ("SQLITE_IOERR_CHECKRESERVEDLOCK", errno.ENOLCK),
    ("SQLITE_IOERR_SHMLOCK", errno.ENOLCK),
    ("SQLITE_IOERR_SHMMAP", errno.EOPNOTSUPP),
    ("SQLITE_IOERR_SHMOPEN", errno.EOPNOTSUPP),
    ("SQLITE_IOERR", errno.EIO),
    ("SQLITE_CANTOPEN_ISDIR", errno.EISDIR),
    ("SQLITE_CANTOPEN_SYMLINK", errno.ELOOP),
    ("SQLITE_READONLY_DBMOVED", errno.ENOENT),
    ("SQLITE_READONLY", errno.EACCES),
    ("SQLITE_PERM", errno.EACCES),
    ("SQLITE_NOLFS", errno.EFBIG),
)
#: SQLite returns these when another process has locked the file, or when its locks do not work.
_LOCKED: Final = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_PROTOCOL")


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Convert SQLite errors to ManifestErrors that name the file, the cause and the next step."""
    try:
        yield
    except UnicodeDecodeError as error:  # sqlite3 could not decode its own error message
        raise damaged(path, shown(error.object)) from error
    except sqlite3.Error as error:
        raise _explained(error, path) from error
    except OSError as error:
        raise _refused(error.errno, path, named(error.errno)) from error


def _explained(error: sqlite3.Error, path: Path) -> ManifestError:
    code: str = getattr(error, "sqlite_errorname", None) or type(error).__name__
    if is_damage(error):
        return damaged(path, f"{error}, {code}")
    number = next((number for prefix, number in _ERRNOS if code.startswith(prefix)), None)
    # Some codes hide the errno. Probe the file system now to find it.
    now = _errno_at(path)
    if code.startswith(_LOCKED):
        number = now if now in (errno.ENOLCK, *LIMIT_ERRNOS) else None
    elif code.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY")):
        number = now or number
    elif number == errno.EIO and (now == errno.EFBIG or cause_of(now).is_storage):
        number = now  # for example, an exhausted quota
    if number is None and code.startswith(_LOCKED):
        return ManifestError(
            f"{path}: another process has the manifest locked ({error}, {code}). "
            "Wait for it or end it, and run the same command again."
        )
    if number is None:
        return ManifestError(f"{path}: {error} ({code})")
    return _refused(number, path, f"{error}, {code}; {named(number)}")


def _refused(number: int | None, path: Path, details: str) -> ManifestError:
    cause = cause_of(number)
    kind = ManifestSpaceError if cause.is_storage else ManifestError
    return kind(
        f"{path}: the manifest cannot be used: {cause.what} ({details}). "
        f"What was committed is safe: {cause.advice}, and run the same command again."
    )


def _errno_at(path: Path) -> int | None:
    """Probe the file system of `path` with a temporary file; None if all operations succeed.

    The file is created, locked, and written at the manifest's size, in the same directory. `path`
    itself is not opened: closing it would drop the locks that this process has on it.
    """
    try:
        beside = path.with_name(f"{path.name}-wal")
        sizes = [file.stat().st_size for file in (path, beside) if file.exists()]
        descriptor = os.open(os.devnull, os.O_RDONLY)
        os.close(descriptor)
        with tempfile.TemporaryFile(dir=path.parent, buffering=0) as trial:
            try:
                fcntl.lockf(trial, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                return errno.ENOLCK if error.errno in NO_LOCKS_ERRNOS else error.errno
            os.pwrite(trial.fileno(), bytes(4096), max(sizes, default=0))
            os.fsync(trial)
    except OSError as error:
        return error.errno
    return None


#: Prefixes of SQLite result codes that mean damaged content. All statements of this tool are valid,
#: so a statement that fails means that the file has another schema.
_DAMAGE = (
    "SQLITE_NOTADB", "SQLITE_CORRUPT", "SQLITE_ERROR", "SQLITE_SCHEMA", "SQLITE_FORMAT",
    "SQLITE_TOOBIG", "SQLITE_INTERRUPT", "SQLITE_MISMATCH", "SQLITE_RANGE",
    "SQLITE_IOERR_SHORT_READ", "SQLITE_READONLY_ROLLBACK",
)  # fmt: skip


def is_damage(error: sqlite3.Error) -> bool:
    """Whether an error is caused by the file's content, not by the file system or a bug."""
    code = getattr(error, "sqlite_errorname", None)
    if code is None:  # raised by Python's module, for text that is not UTF-8
        return isinstance(error, sqlite3.OperationalError)
    return str(code).startswith(_DAMAGE)


def damaged(path: Path, what: str) -> ManifestDamaged:
    return ManifestDamaged(
        f"{path}: not a sound manifest ({what}). Restore it from a copy, or use a new --out."
    )

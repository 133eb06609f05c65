"""The manifest file: one SQLite database, written by one thread. The only module with SQL.

Durability: WAL with `synchronous=FULL`. A commit is on the disk before it returns, which the
client needs: it unlinks a dump only after the commit that says where its copy lies. (With NORMAL
a power cut may drop the last commits, and a dropped one whose dump is gone is a lost sample.)
Its cost, one fsync a commit, is shared by everything that a commit holds.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from manifest.errors import ManifestError, ManifestMissing, ManifestSpaceError
from manifest.records import (
    Change,
    Failed,
    Forgotten,
    Moved,
    Planned,
    Rejected,
    Relocated,
    Row,
    Shard,
    Source,
    Stored,
    Totals,
)
from manifest.schema import migrations
from manifest.states import Event, IllegalTransition, Reason, State, advance

_TERMINAL = "('stored', 'failed')"
#: Word for word the condition of the index `prompts_unfinished`, or SQLite does not use that.
_UNFINISHED = f"state NOT IN {_TERMINAL}"
_TALLIES = "SELECT state, reason, num_rows, num_tokens, size_bytes, num_untrained"
_PAGE_ROWS = 10_000
_COLUMNS = (
    "ordinal, source, line, label, key, num_tokens, num_trained, state, reason, detail, "
    "attempts, shard, offset, size_bytes, digest, num_pieces, part, alterations"
)


class Store:
    """An open manifest. Not thread-safe: the thread that opens it is the one that uses it."""

    def __init__(self, database: Database, path: Path, *, is_writer: bool) -> None:
        self._db = database
        self.path = path
        self._is_writer = is_writer

    # --- opening -----------------------------------------------------------------------------

    @classmethod
    def create_or_open(cls, path: Path) -> Store:
        """Open for writing; make the file and its tables where they are missing."""
        with _explained(path):
            database = Database(sqlite3.connect(path, isolation_level=None))
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = FULL")
            database.execute("PRAGMA foreign_keys = ON")
            # Bounds the WAL file after a burst; no reader here holds a cursor open for long.
            database.execute("PRAGMA journal_size_limit = 67108864")
            _check_version(database, path)
            migrations.apply(database)
            return cls(database, path, is_writer=True)

    @classmethod
    def open_read_only(cls, path: Path) -> Store:
        """Open for reading, also while another process writes. Raises ManifestMissing."""
        if not path.is_file():
            raise ManifestMissing(
                f"{path}: no manifest there. Name the directory given to `extractor run --out`."
            )
        if not path.stat().st_size:
            raise ManifestMissing(
                f"{path} is an empty file: no data set was begun there, or its manifest was lost."
            )
        with _explained(path):
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
            return cls(database, path, is_writer=False)

    def close(self) -> None:
        """Close the file. A writer leaves one plain file behind, without a WAL beside it: it can
        be copied, and read where nothing can be written."""
        if self._is_writer:
            self._is_writer = False  # closing twice is closing once
            # Refused while somebody reads: then the WAL stays, which is as good.
            with suppress(sqlite3.OperationalError):
                self._db.execute("PRAGMA journal_mode = DELETE")
        self._db.close()

    # --- the run as a whole ------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """What the data set is of, by field name; empty for a new manifest."""
        with self._reading():
            rows = self._db.execute("SELECT name, value FROM identity").fetchall()
        return {name: json.loads(value) for name, value in rows}

    def begin(self, identity: Mapping[str, Any], sources: Iterable[Source]) -> None:
        """Record what a new data set is of and which files it reads, in one transaction."""
        with self._writing():
            self._db.conn.executemany(
                "INSERT INTO identity (name, value) VALUES (?, ?)",
                [(name, json.dumps(value)) for name, value in identity.items()],
            )
            self._db.conn.executemany(
                "INSERT INTO sources (number, path, size_bytes, digest, num_rows) "
                "VALUES (?, ?, ?, ?, ?)",
                [(s.number, s.path, s.size_bytes, s.digest, s.num_rows) for s in sources],
            )

    def sources(self) -> list[Source]:
        with self._reading():
            rows = self._db.execute(
                "SELECT number, path, size_bytes, digest, num_rows FROM sources ORDER BY number"
            ).fetchall()
        return [
            Source(number=number, path=path, size_bytes=size, digest=digest, num_rows=num_rows)
            for number, path, size, digest, num_rows in rows
        ]

    # --- prompts -----------------------------------------------------------------------------

    def apply(self, changes: Iterable[Change]) -> None:
        """Write `changes`, in order, in one durable transaction: all or none.

        Raises IllegalTransition when a change does not follow from the state that the row is in,
        ManifestSpaceError when the disk is full.
        """
        with self._writing():
            for change in changes:
                self._apply(change)

    def _apply(self, change: Change) -> None:
        match change:
            case Planned():
                self._plan(change)
            case Rejected():
                self._reject(change)
            case Moved(event=Event.LOSE):
                self._update(change.ordinal, change.event, attempts=change.attempts)
                self._db.conn.execute(
                    "UPDATE prompts SET num_deaths = num_deaths + 1 WHERE ordinal = ?",
                    (change.ordinal,),
                )
            case Moved():
                self._update(change.ordinal, change.event, attempts=change.attempts)
            case Relocated():
                self._update(change.ordinal, Event.MOVE, shard=change.shard, offset=change.offset)
            case Forgotten():
                self._update(
                    change.ordinal,
                    Event.FORGET,
                    **dict.fromkeys(("shard", "offset", "size_bytes", "digest", "num_pieces")),
                )
            case Stored():
                self._update(
                    change.ordinal,
                    Event.STORE,
                    shard=change.shard,
                    offset=change.offset,
                    size_bytes=change.size_bytes,
                    digest=change.digest,
                    num_pieces=change.num_pieces,
                )
            case Failed():
                self._update(
                    change.ordinal,
                    Event.FAIL,
                    reason=change.reason.value,
                    detail=change.detail,
                    attempts=change.attempts,
                )

    def _plan(self, row: Planned) -> None:
        # A row that an earlier session left unfinished is there already, perhaps with another
        # key: some chat templates write today's date. Nothing of it is stored, so today's counts.
        cursor = self._db.conn.execute(
            "INSERT INTO prompts (ordinal, source, line, label, key, num_tokens, num_trained, "
            "part, alterations, detail, state) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'planned') "
            "ON CONFLICT (ordinal) DO UPDATE SET state = 'planned', key = excluded.key, "
            "num_tokens = excluded.num_tokens, num_trained = excluded.num_trained, "
            "alterations = excluded.alterations, detail = excluded.detail "
            f"WHERE state NOT IN {_TERMINAL}",
            (row.ordinal, row.source, row.line, row.label, row.key, row.num_tokens,
             row.num_trained, row.part, ",".join(row.alterations) or None, row.detail),
        )  # fmt: skip
        if cursor.rowcount != 1:
            raise IllegalTransition(f"row {row.ordinal} is settled already")

    def _reject(self, row: Rejected) -> None:
        cursor = self._db.conn.execute(
            "INSERT INTO prompts (ordinal, source, line, label, key, num_tokens, part, state, "
            "reason, detail) VALUES (?, ?, ?, ?, ?, ?, ?, 'failed', ?, ?) ON CONFLICT (ordinal) "
            "DO UPDATE SET state = 'failed', reason = excluded.reason, detail = excluded.detail "
            f"WHERE state NOT IN {_TERMINAL}",
            (row.ordinal, row.source, row.line, row.label, row.key, row.num_tokens, row.part,
             row.reason.value, row.detail),
        )  # fmt: skip
        if cursor.rowcount != 1:
            raise IllegalTransition(f"row {row.ordinal} is settled already")

    def _update(self, ordinal: int, event: Event, **columns: Any) -> None:
        found = self._db.conn.execute(
            "SELECT state FROM prompts WHERE ordinal = ?", (ordinal,)
        ).fetchone()
        if found is None:
            raise IllegalTransition(f"{event} for row {ordinal}, which was never planned")
        columns["state"] = advance(State(found[0]), event).value
        assignments = ", ".join(f"{name} = ?" for name in columns)
        self._db.conn.execute(
            f"UPDATE prompts SET {assignments} WHERE ordinal = ?", (*columns.values(), ordinal)
        )

    def reopen_unfinished(self) -> int:
        """Put every row that a dead session left between PLANNED and STORED back to PLANNED."""
        with self._writing():
            cursor = self._db.conn.execute(
                f"UPDATE prompts SET state = 'planned' WHERE {_UNFINISHED} AND state != 'planned'"
            )
            return cursor.rowcount

    def reopen_failed(self) -> int:
        """Put every failed row back to PLANNED; how many those were.

        One that never became a prompt is read again like a new one.
        """
        with self._writing():
            cursor = self._db.conn.execute(
                "UPDATE prompts SET state = ?, reason = NULL, detail = NULL, num_deaths = 0 "
                "WHERE state = 'failed'",
                (advance(State.FAILED, Event.REOPEN).value,),
            )
            return cursor.rowcount

    def forget_stored(self, ordinals: Iterable[int]) -> None:
        """Put stored samples back to PLANNED because their bytes turned out to be gone.

        Their shards are open again.
        """
        with self._writing():
            for ordinal in ordinals:
                self._db.conn.execute(
                    "UPDATE shards SET is_sealed = 0, digest = NULL WHERE number = "
                    "(SELECT shard FROM prompts WHERE ordinal = ? AND state = 'stored')",
                    (ordinal,),
                )
                self._apply(Forgotten(ordinal=ordinal))

    def settled_ranges(self) -> Iterator[tuple[int, int]]:
        """Ranges [begin, end) of ordinals that need no more work, ascending.

        Rows are planned in order, so that all below the highest are there, and only the few that
        are not finished have to be looked at. Where some are missing, all are.
        """
        with self._reading():
            ((last,),) = self._db.execute("SELECT COALESCE(MAX(ordinal), -1) FROM prompts")
        if self.totals().num_rows == last + 1:
            begin = 0
            for (ordinal,) in self._pages(
                f"SELECT ordinal FROM prompts WHERE {_UNFINISHED} AND ordinal > ? "
                "ORDER BY ordinal LIMIT ?"
            ):
                if ordinal > begin:
                    yield begin, ordinal
                begin = ordinal + 1
            if begin <= last:
                yield begin, last + 1
            return
        for (ordinal,) in self._pages(
            f"SELECT ordinal FROM prompts WHERE state IN {_TERMINAL} AND ordinal > ? "
            "ORDER BY ordinal LIMIT ?"
        ):
            yield ordinal, ordinal + 1

    def attempts(self) -> dict[int, int]:
        """Requests made so far for each unfinished row that has any."""
        with self._reading():
            return dict(
                self._db.execute(
                    f"SELECT ordinal, attempts FROM prompts WHERE {_UNFINISHED} AND attempts > 0"
                ).fetchall()
            )

    def suspects(self) -> dict[int, int]:
        """Unfinished rows whose request was unanswered when a server died -> how often."""
        with self._reading():
            return dict(
                self._db.execute(
                    "SELECT ordinal, num_deaths FROM prompts "
                    f"WHERE {_UNFINISHED} AND num_deaths > 0"
                ).fetchall()
            )

    def rows(self) -> Iterator[Row]:
        """Every row, by ordinal."""
        return map(
            _row,
            self._pages(
                f"SELECT {_COLUMNS} FROM prompts WHERE ordinal > ? ORDER BY ordinal LIMIT ?"
            ),
        )

    def failed_rows(self) -> Iterator[Row]:
        """The failed rows, by ordinal."""
        return map(
            _row,
            self._pages(
                f"SELECT {_COLUMNS} FROM prompts WHERE state = 'failed' AND ordinal > ? "
                "ORDER BY ordinal LIMIT ?"
            ),
        )

    def keys(self) -> Iterator[tuple[int, str]]:
        """Ordinal and key of every row that gave a prompt, by ordinal; duplicates left out."""
        condition = f"key IS NOT NULL AND reason IS NOT '{Reason.DUPLICATE.value}'"
        yield from self._pages(
            f"SELECT ordinal, key FROM prompts WHERE {condition} AND ordinal > ? "
            "ORDER BY ordinal LIMIT ?"
        )

    def totals(self) -> Totals:
        """From the tallies: takes no longer for many rows than for few."""
        with self._reading():
            tallies = self._db.execute(f"{_TALLIES} FROM tallies WHERE num_rows > 0").fetchall()
            altered = self._db.execute(
                "SELECT alterations, COUNT(*) FROM prompts "
                "WHERE state = 'stored' AND alterations IS NOT NULL GROUP BY alterations"
            ).fetchall()
        by_alteration: dict[str, int] = {}
        for names, count in altered:
            for name in names.split(","):
                by_alteration[name] = by_alteration.get(name, 0) + count
        by_state: dict[State, int] = {}
        by_reason: dict[Reason, int] = {}
        stored = (0, 0, 0)
        for state, reason, num_rows, *amounts in tallies:
            by_state[State(state)] = by_state.get(State(state), 0) + num_rows
            if reason:
                by_reason[Reason(reason)] = num_rows
            if state == State.STORED.value:
                stored = (amounts[0], amounts[1], amounts[2])
        return Totals(
            by_alteration=by_alteration,
            by_state=by_state,
            by_reason=by_reason,
            stored_tokens=stored[0],
            stored_bytes=stored[1],
            untrained=stored[2],
        )

    def count_duplicates(self) -> int:
        """Stored samples whose key another stored sample of lower ordinal has. Reads every row."""
        with self._reading():
            ((count,),) = self._db.execute(
                # Sorted, which is four times as fast as COUNT(DISTINCT) for millions of keys.
                "SELECT COALESCE(SUM(num_same - 1), 0) FROM (SELECT COUNT(*) AS num_same "
                "FROM prompts WHERE state = 'stored' GROUP BY key)"
            ).fetchall()
        return int(count)

    # --- shards ------------------------------------------------------------------------------

    def add_shard(self, shard: Shard) -> None:
        with self._writing():
            self._db.conn.execute(
                "INSERT INTO shards (number, name, data_start, end_bytes) VALUES (?, ?, ?, ?)",
                (shard.number, shard.name, shard.data_start, shard.data_start),
            )

    def seal_shard(self, number: int, digest: str) -> None:
        with self._writing():
            self._db.conn.execute(
                "UPDATE shards SET is_sealed = 1, digest = ? WHERE number = ?", (digest, number)
            )

    def drop_shard(self, number: int) -> None:
        """Remove a shard that holds no sample."""
        with self._writing():
            self._db.conn.execute("DELETE FROM shards WHERE number = ?", (number,))

    def shards(self) -> list[Shard]:
        with self._reading():
            rows = self._db.execute(
                "SELECT number, name, data_start, is_sealed, end_bytes, num_samples, digest "
                "FROM shards ORDER BY number"
            ).fetchall()
        return [
            Shard(
                number=number,
                name=name,
                data_start=data_start,
                is_sealed=bool(is_sealed),
                size_bytes=size_bytes,
                num_samples=num_samples,
                digest=digest,
            )
            for number, name, data_start, is_sealed, size_bytes, num_samples, digest in rows
        ]

    def shard_rows(self, number: int) -> list[Row]:
        """The samples of one shard, in file order."""
        with self._reading():
            rows = self._db.execute(
                f"SELECT {_COLUMNS} FROM prompts WHERE shard = ? ORDER BY offset", (number,)
            ).fetchall()
        return [_row(row) for row in rows]

    # --- the file itself ---------------------------------------------------------------------

    def integrity_problems(self) -> list[str]:
        """What SQLite's own check finds, and tallies that do not agree with the rows; empty when
        the file is sound. Reads every row."""
        with self._reading():
            found = [str(row[0]) for row in self._db.execute("PRAGMA integrity_check").fetchall()]
            if found != ["ok"]:
                return found
            stated = set(self._db.execute(f"{_TALLIES} FROM tallies WHERE num_rows > 0"))
            counted = set(
                self._db.execute(
                    "SELECT state, COALESCE(reason, ''), COUNT(*), COALESCE(SUM(num_tokens), 0), "
                    "COALESCE(SUM(size_bytes), 0), COALESCE(SUM(num_trained = 0), 0) "
                    "FROM prompts GROUP BY 1, 2"
                )
            )
        return [
            f"the tallies are not those of the rows: {state} {reason}".rstrip()
            for state, reason in sorted({row[:2] for row in counted ^ stated})
        ]

    def _pages(self, sql: str) -> Iterator[tuple[Any, ...]]:
        # Pages by ordinal, not one long cursor: an open read cursor would keep the WAL growing.
        last = -1
        while True:
            with self._reading():
                page = self._db.execute(sql, [last, _PAGE_ROWS]).fetchall()
            yield from page
            if len(page) < _PAGE_ROWS:
                return
            last = page[-1][0]

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with _explained(self.path), self._db.atomic():
            yield

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with _explained(self.path):
            yield


def _row(values: tuple[Any, ...]) -> Row:
    names = _COLUMNS.split(", ")
    fields = dict(zip(names, values, strict=True))
    fields["state"] = State(fields["state"])
    fields["reason"] = None if fields["reason"] is None else Reason(fields["reason"])
    fields["alterations"] = tuple(filter(None, (fields["alterations"] or "").split(",")))
    return Row(**fields)


def _check_version(database: Database, path: Path) -> None:
    known = {migration.name for migration in migrations.pending(Database(memory=True))}
    unknown = {migration.name for migration in migrations.applied(database)} - known
    if unknown:
        raise ManifestError(
            f"{path}: written by a newer version of this tool (has {', '.join(sorted(unknown))}). "
            "Upgrade hidden-state-extractor."
        )


@contextmanager
def _explained(path: Path) -> Iterator[None]:
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

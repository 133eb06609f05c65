"""Writes the manifest: one SQLite file, with one writer thread of one process at a time.

Row changes go through `row_changes` and `bulk_write`; all other writes of a session are here.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, islice
from operator import attrgetter
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from manifest import bulk_write
from manifest.database import damaged, explained, open_for_writing
from manifest.decoding import (
    IDENTITY,
    SOURCES,
    STARTS,
    Damage,
    canary_digest,
    row_checksum,
)
from manifest.exceptions import ManifestError
from manifest.reader import Reader
from manifest.records import Change, Forgotten, ServerStart, Shard, Source
from manifest.row_changes import RowCache
from server_patch.settings import DEFAULT_FILE_MODE


class Store(Reader):
    """An open manifest, writable if `create_or_open` opened it."""

    def __init__(self, database: Database, path: Path, *, is_writer: bool = False) -> None:
        super().__init__(database, path)
        self._is_writer = is_writer
        self._rows: RowCache | None = None  # as the last changes left them; None: load again

    @classmethod
    def create_or_open(cls, path: Path, *, file_mode: int = DEFAULT_FILE_MODE) -> Store:
        """Open for writing; make the file and its tables where they are missing.

        file_mode: permission bits of a new file.
        """
        database = open_for_writing(path, file_mode=file_mode)
        with explained(path):
            bulk_write.prepare(database.conn)
        return cls(database, path, is_writer=True)

    def close(self) -> None:
        """Close the file. A writer leaves one plain file behind, without a WAL beside it: it can
        be copied, and read where nothing can be written."""
        if self._is_writer:
            self._is_writer = False  # closing twice is closing once
            # Refused while another process reads: then the WAL stays, which is as good.
            with suppress(sqlite3.OperationalError):
                self._db.execute("PRAGMA journal_mode = DELETE")
        super().close()

    # --- the run as a whole ------------------------------------------------------------------

    def begin(self, identity: Mapping[str, Any], sources: Iterable[Source]) -> None:
        """Record the identity and the input files of a new data set, in one transaction."""
        with self._writing():
            self._insert(
                "identity",
                IDENTITY,
                ((name, json.dumps(value)) for name, value in identity.items()),
            )
            self._insert("sources", SOURCES, map(attrgetter(*SOURCES), sources))

    def add_server_start(self, start: ServerStart, canary: bytes | None) -> None:
        """Record a server start, before any of its rows is stored.

        `canary`: the states of its canary if they become the reference for later starts.
        """
        with self._writing():
            values = (
                json.dumps(start.accepted),
                start.boot_id,
                start.canary_error,
                json.dumps(start.facts),
                start.number,
                start.session,
                start.url,
                start.used_at,
            )
            self._insert("server_starts", STARTS, [values])
            if canary is not None:
                self._db.conn.execute(
                    "INSERT INTO canaries (server, dump, digest) VALUES (?, ?, ?)",
                    (start.number, canary, canary_digest(canary)),
                )

    def amend(self, name: str, value: Any) -> None:
        """Add or replace one field of the data set's identity."""
        with self._writing():
            self._db.conn.execute("DELETE FROM identity WHERE name = ?", (name,))
            self._insert("identity", IDENTITY, [(name, json.dumps(value))])

    def _insert(
        self, table: str, columns: Collection[str], rows: Iterable[tuple[object, ...]]
    ) -> None:
        """Add rows, each with the checksum of its columns."""
        self._db.conn.executemany(
            f"INSERT INTO {table} ({', '.join(columns)}, checksum) "
            f"VALUES (?{', ?' * len(columns)})",
            [(*values, row_checksum(columns, values)) for values in rows],
        )

    # --- prompts -----------------------------------------------------------------------------

    def apply(self, changes: Iterable[Change]) -> None:
        """Write `changes`, in order, in one durable transaction: all or none.

        Raises IllegalTransition when a change does not follow from the state that the row is in,
        PromptChanged when a row's prompt differs from the planned one, ManifestSpaceError when the
        disk is full or failing.
        """
        self._require_writer()
        with explained(self.path):
            self._apply(list(changes))

    def _apply(self, changes: Sequence[Change]) -> None:
        if not changes:
            return
        # Set again at the end: rows that were folded but not written must not be used.
        rows, self._rows = self._rows or self._rows_in_file(), None
        batch = rows.fold(changes)
        bulk_write.write_batch(self._db.conn, batch)
        rows.forget_settled(batch.rows)
        self._rows = rows

    def _rows_in_file(self) -> RowCache:
        connection = self._db.conn
        ((first_free,),) = connection.execute("SELECT COALESCE(MAX(ordinal) + 1, 0) FROM prompts")
        load = partial(bulk_write.read_rows, connection)
        return RowCache(load, first_free=first_free)

    def reopen_failed(self) -> int:
        """Put every failed row back to PLANNED, to be read again if it gave no prompt; their
        number."""
        with self._writing():
            cursor = self._db.conn.execute(
                "UPDATE prompts SET state = 'planned', reason = NULL, detail = NULL, "
                "num_deaths = 0, checksum = NULL WHERE state = 'failed'"
            )
            bulk_write.tally_failed_as_planned(self._db.conn)
            return cursor.rowcount

    def forget_stored(self, ordinals: Iterable[int]) -> None:
        """Put stored samples whose bytes are gone back to PLANNED, and open their shards again."""
        ordinals = list(ordinals)
        with self._writing():
            for ordinal in ordinals:
                self._db.conn.execute(
                    "UPDATE shards SET is_sealed = 0, digest = NULL WHERE number = "
                    "(SELECT shard FROM prompts WHERE ordinal = ? AND state = 'stored')",
                    (ordinal,),
                )
            self._apply([Forgotten(ordinal=ordinal) for ordinal in ordinals])

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

    # --- repair ------------------------------------------------------------------------------

    def mend(self, *, drop: Iterable[int]) -> None:
        """Rebuild indexes, tallies, shard totals and names from the rows, and drop damaged rows.

        `drop`: ordinals of rows, which the next session reads from the input again. Raises
        ManifestError, and changes nothing, if the result is still not sound.
        """
        with self._writing():
            self._db.execute("REINDEX")
            self._db.conn.executemany(
                "DELETE FROM prompts WHERE ordinal = ?", [(ordinal,) for ordinal in drop]
            )
            self._db.conn.executemany(
                "UPDATE shards SET name = ? WHERE number = ? AND name IS NOT ?",
                [(shard.name, shard.number, shard.name) for shard in self._shards()],
            )
            bulk_write.count_again(self._db.conn)
            problems = self.integrity_problems() or self.tally_problems()
            records = chain(
                self.checked_sources(),
                self.checked_server_starts(),
                (canary for _, canary in self.checked_canaries()),
                self.checked_shards(),
                self.checked_shard_names(),
                self.checked_rows(),
            )
            problems += map(str, islice((r for r in records if isinstance(r, Damage)), 1))
            if problems:
                raise damaged(self.path, problems[0])

    # --- transactions ------------------------------------------------------------------------

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One durable transaction."""
        self._require_writer()
        with explained(self.path), self._db.atomic():
            try:
                yield
            finally:
                self._rows = None  # the transaction may have changed any of them, or failed

    def _require_writer(self) -> None:
        if not self._is_writer:
            raise ManifestError(f"{self.path}: open for reading only, nothing can be written.")

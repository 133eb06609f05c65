"""Reads the manifest: all queries that change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

from sqlite_utils import Database

from manifest.bulk_write import END_BYTES, NUM_SAMPLES, TALLIES_OF_ROWS
from manifest.database import (
    damaged,
    expected_schema,
    explained,
    open_for_reading,
    schema_of,
)
from manifest.decoding import (
    PROMPT_COLUMNS,
    SHARDS,
    SOURCES,
    STARTS,
    TALLIES,
    Damage,
    canary_digest,
    decode,
    decode_identity,
    decode_prompt,
    decode_shard,
    decode_source,
    decode_start,
    decode_stored,
    shard_name_damage,
    shown,
)
from manifest.exceptions import ManifestDamaged
from manifest.records import Row, ServerStart, Shard, Source, StoredRow, Totals
from manifest.states import Reason, State

TERMINAL = "('stored', 'failed')"
#: Word for word the condition of the index `prompts_unfinished`, or SQLite does not use that.
UNFINISHED = f"state NOT IN {TERMINAL}"
_PAGE_ROWS = 10_000
#: Ten states of 64,000 values in float32 for each of its tokens.
_MAX_CANARY_BYTES = 64 << 20
_FETCHED_ROWS = 256  # rows to hold in memory at a time
_PROMPTS = f"SELECT {', '.join(PROMPT_COLUMNS)}, checksum FROM prompts"
_ORDINAL, _OFFSET = (PROMPT_COLUMNS.index(name) for name in ("ordinal", "offset"))
#: Instructions of SQLite's virtual machine between two calls of the progress handler.
_WORK_STEPS = 1_000_000


Record = TypeVar("Record")


class Reader:
    """An open manifest. Not thread-safe: only the thread that opens it may use it."""

    def __init__(self, database: Database, path: Path) -> None:
        self._db = database
        self.path = path

    @classmethod
    def open_read_only(cls, path: Path) -> Self:
        """Open for reading, also while another process writes. Raises ManifestMissing."""
        return cls(open_for_reading(path), path)

    def close(self) -> None:
        self._db.close()

    # --- the run as a whole ------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """The identity of the data set, by field name; empty for a new manifest."""
        fields = [self._sound(record) for record in self.checked_identity()]
        return {row["name"]: row["value"] for row in fields}

    def checked_identity(self) -> list[dict[str, Any] | Damage]:
        """`name` and `value` of each field."""
        rows = self._fetch("SELECT name, value, checksum FROM identity")
        return [decode_identity(row) for row in rows]

    def has_begun(self) -> bool:
        """Whether the manifest has an identity. Raises ManifestDamaged for rows without one."""
        if self._fetch("SELECT 1 FROM identity LIMIT 1"):
            return True
        for table in ("sources", "prompts", "shards"):
            if self._fetch(f"SELECT 1 FROM {table} LIMIT 1"):
                raise damaged(self.path, f"it has {table} but no identity")
        return False

    def sources(self) -> list[Source]:
        return [self._sound(record) for record in self.checked_sources()]

    def checked_sources(self) -> list[Source | Damage]:
        rows = self._fetch(f"SELECT {', '.join(SOURCES)}, checksum FROM sources ORDER BY number")
        return [decode_source(row) for row in rows]

    def server_starts(self) -> list[ServerStart]:
        """Every server start that a session extracted from, in the order of use."""
        return [self._sound(record) for record in self.checked_server_starts()]

    def checked_server_starts(self) -> list[ServerStart | Damage]:
        rows = self._fetch(
            f"SELECT {', '.join(STARTS)}, checksum FROM server_starts ORDER BY number"
        )
        return [decode_start(row) for row in rows]

    def canary(self) -> bytes | None:
        """The dump that new canaries are compared with; None before the first."""
        dump = None
        for _, found in self.checked_canaries():
            dump = self._sound(found)
        return dump

    def checked_canaries(self) -> Iterator[tuple[int, bytes | Damage]]:
        """The number of each start whose canary became the reference, and the canary's dump."""
        for number, size in self._fetch(
            "SELECT server, length(dump) FROM canaries ORDER BY server"
        ):
            found: bytes | Damage = Damage(
                table="canaries", place=number, detail="its digest is not that of its dump"
            )
            if isinstance(size, int) and size <= _MAX_CANARY_BYTES:
                for dump, digest in self._fetch(
                    "SELECT dump, digest FROM canaries WHERE server = ?", number
                ):
                    if isinstance(dump, bytes) and digest == canary_digest(dump):
                        found = dump
            yield number, found

    # --- prompts -----------------------------------------------------------------------------

    def settled_ranges(self) -> Iterator[tuple[int, int]]:
        """Ranges [begin, end) of ordinals that need no more work, ascending.

        Rows are planned in order, so that all below the highest are there, and only the few that
        are not finished have to be looked at. Where some are missing, all are.
        """
        ((last,),) = self._fetch("SELECT COALESCE(MAX(ordinal), -1) FROM prompts")
        if self.totals().num_rows == last + 1:
            begin = 0
            for (ordinal,) in self._pages(
                f"SELECT ordinal FROM prompts WHERE {UNFINISHED} AND ordinal > ? "
                "ORDER BY ordinal LIMIT ?"
            ):
                if ordinal > begin:
                    yield begin, ordinal
                begin = ordinal + 1
            if begin <= last:
                yield begin, last + 1
            return
        for (ordinal,) in self._pages(
            f"SELECT ordinal FROM prompts WHERE state IN {TERMINAL} AND ordinal > ? "
            "ORDER BY ordinal LIMIT ?"
        ):
            yield ordinal, ordinal + 1

    def attempts(self) -> dict[int, int]:
        """The recorded attempts of each unfinished row that has any."""
        return self._unfinished_with("attempts")

    def suspects(self) -> dict[int, int]:
        """Unfinished rows that a dying server had not answered -> how often."""
        return self._unfinished_with("num_deaths")

    def _unfinished_with(self, column: str) -> dict[int, int]:
        return dict(
            self._fetch(
                f"SELECT ordinal, {column} FROM prompts WHERE {UNFINISHED} AND {column} > 0"
            )
        )

    def rows(self) -> Iterator[Row]:
        """Every row, by ordinal."""
        return map(self._sound, self.checked_rows())

    def checked_rows(self) -> Iterator[Row | Damage]:
        """Every row, by ordinal; a Damage in place of each damaged one."""
        return self._checked_pages(f"{_PROMPTS} WHERE ordinal > ? ORDER BY ordinal LIMIT ?")

    def first_stored(self, count: int) -> list[StoredRow]:
        """The `count` stored rows with the lowest ordinals."""
        rows = self._fetch(f"{_PROMPTS} WHERE state = 'stored' ORDER BY ordinal LIMIT ?", count)
        return [self._sound(decode_stored(row)) for row in rows]

    def failed_rows(self) -> Iterator[Row]:
        """The failed rows, by ordinal."""
        return map(
            self._sound,
            self._checked_pages(
                f"{_PROMPTS} WHERE state = 'failed' AND ordinal > ? ORDER BY ordinal LIMIT ?"
            ),
        )

    def keys(self) -> Iterator[tuple[int, str]]:
        """Ordinal and key of every row that gave a prompt, by ordinal; duplicates left out."""
        condition = f"key IS NOT NULL AND reason IS NOT '{Reason.DUPLICATE.value}'"
        yield from self._pages(
            f"SELECT ordinal, key FROM prompts WHERE {condition} AND ordinal > ? "
            "ORDER BY ordinal LIMIT ?"
        )

    def totals(self, *, with_alterations: bool = True) -> Totals:
        """From the tallies: takes no longer for many rows than for few.

        Counting the alterations reads every row that has one: leave them out when polling.
        """
        tallies = self._fetch(f"SELECT {', '.join(TALLIES)} FROM tallies")
        altered = self._fetch(
            "SELECT alterations, COUNT(*) FROM prompts "
            "WHERE state = 'stored' AND alterations IS NOT NULL AND ? GROUP BY alterations",
            with_alterations,
        )
        by_alteration: dict[str, int] = {}
        for names, count in altered:
            for name in str(names).split(","):
                by_alteration[name] = by_alteration.get(name, 0) + count
        by_state: dict[State, int] = {}
        by_reason: dict[Reason, int] = {}
        stored = (0, 0, 0)
        for values in tallies:
            tally = self._sound(decode("tallies", TALLIES, values, place=values[:2]))
            state, num_rows = tally["state"], tally["num_rows"]
            if not num_rows:
                continue
            by_state[state] = by_state.get(state, 0) + num_rows
            if tally["reason"]:
                by_reason[tally["reason"]] = num_rows
            if state is State.STORED:
                stored = (tally["num_tokens"], tally["size_bytes"], tally["num_untrained"])
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
        # Sorted, which is four times as fast as COUNT(DISTINCT) for millions of keys.
        ((count,),) = self._fetch(
            "SELECT COALESCE(SUM(num_same - 1), 0) FROM (SELECT COUNT(*) AS num_same "
            "FROM prompts WHERE state = 'stored' GROUP BY key)"
        )
        return int(count)

    # --- shards ------------------------------------------------------------------------------

    def shards(self) -> list[Shard]:
        for damage in self.checked_shard_names():
            self._sound(damage)
        return self._shards()

    def _shards(self) -> list[Shard]:
        return [self._sound(record) for record in self.checked_shards()]

    def checked_shard_names(self) -> list[Damage]:
        """A Damage for each shard under another name than its number gives it."""
        names = self._fetch("SELECT number, name FROM shards ORDER BY number")
        return [damage for row in names if (damage := shard_name_damage(*row)) is not None]

    def checked_shards(self) -> list[Shard | Damage]:
        """The shards by number, whatever names are recorded for them."""
        rows = self._fetch(f"SELECT {', '.join(SHARDS)} FROM shards ORDER BY number")
        return [decode_shard(row) for row in rows]

    def shard_rows(self, number: int) -> list[StoredRow]:
        """The samples of one shard, in file order."""
        return [self._sound(record) for record in self.checked_shard_rows(number)]

    def checked_shard_rows(self, number: int) -> Iterator[StoredRow | Damage]:
        """The samples of one shard, in file order; a Damage in place of each damaged one."""
        place = (-1, -1)
        while True:
            page = self._fetch(
                f"{_PROMPTS} WHERE shard = ? AND (offset, ordinal) > (?, ?) "
                "ORDER BY offset, ordinal LIMIT ?",
                number, *place, _FETCHED_ROWS,
            )  # fmt: skip
            for values in page:
                following = (values[_OFFSET], values[_ORDINAL])
                if not _is_behind(place, following):
                    detail = f"out of order among the samples of shard {number}"
                    yield Damage(table="prompts", place=following[1], detail=detail)
                    return
                place = following
                yield decode_stored(values)
            if len(page) < _FETCHED_ROWS:
                return

    # --- the file itself ---------------------------------------------------------------------

    def limit_work(self) -> None:
        """Bound the work of later queries by the file size: in a damaged file, pages may form a
        loop."""
        size = sum(
            path.stat().st_size
            for path in (self.path, self.path.with_name(f"{self.path.name}-wal"))
            if path.exists()
        )
        left = 1_000 + 1_000 * size // _WORK_STEPS

        def look() -> bool:
            nonlocal left
            left -= 1
            return left < 0

        self._db.conn.set_progress_handler(look, _WORK_STEPS)

    def integrity_problems(self) -> list[str]:
        """Problems that SQLite's check finds, and differences of the schema. Reads every row."""
        problems = [str(row[0]) for row in self._fetch("PRAGMA integrity_check")]
        problems = [] if problems == ["ok"] else problems
        with explained(self.path):
            found, expected = schema_of(self._db), expected_schema()
        problems += [
            f"{name} is not defined as this tool defines it"
            for name in sorted({*found, *expected})
            if found.get(name) != expected.get(name)
        ]
        return problems

    def tally_problems(self) -> list[str]:
        """Tallies and sample totals of shards that do not match the rows."""
        columns = ", ".join(TALLIES)
        empty = "(num_rows, num_tokens, size_bytes, num_untrained) IS (0, 0, 0, 0)"
        stated = set(self._fetch(f"SELECT {columns} FROM tallies WHERE NOT {empty}"))
        counted = set(self._fetch(TALLIES_OF_ROWS))
        problems = [
            "the tallies are not those of the rows: "
            + " ".join(part if isinstance(part, str) else shown(part) for part in row).rstrip()
            for row in sorted({row[:2] for row in counted ^ stated}, key=repr)
        ]
        problems += [
            f"shards, row {number}: it does not count the samples that the rows have"
            for (number,) in self._fetch(
                f"SELECT number FROM shards WHERE num_samples IS NOT {NUM_SAMPLES} "
                f"OR end_bytes IS NOT {END_BYTES}"
            )
        ]
        return problems

    # --- queries -----------------------------------------------------------------------------

    def _fetch(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        with explained(self.path):
            return list(self._db.execute(sql, values).fetchall())

    def _sound(self, record: Record | Damage) -> Record:
        if isinstance(record, Damage):
            raise damaged(self.path, f"{record}; `extractor verify` lists all")
        return record

    def _checked_pages(self, sql: str) -> Iterator[Row | Damage]:
        last = -1
        pages = self._pages(sql, place=_ORDINAL)
        while True:
            try:
                values = next(pages)
            except StopIteration:
                return
            except ManifestDamaged as error:
                detail = f"it and all behind it cannot be read: {error.__cause__ or error}"
                yield Damage(table="prompts", place=last + 1, detail=detail)
                return
            last = values[_ORDINAL]
            yield decode_prompt(values)

    def _pages(self, sql: str, *, place: int = 0) -> Iterator[tuple[Any, ...]]:
        """Rows in ordinal order; `place` is the index of the ordinal's column."""
        # Pages, not one long cursor: an open read cursor would keep the WAL growing.
        last = -1
        while True:
            count = 0
            with explained(self.path):
                cursor = self._db.execute(sql, [last, _PAGE_ROWS])
            while True:
                with explained(self.path):
                    rows = cursor.fetchmany(_FETCHED_ROWS)
                if not rows:
                    break
                for row in rows:
                    if not _is_behind(last, row[place]):
                        raise damaged(self.path, f"prompts out of order behind row {last}")
                    last = row[place]
                    count += 1
                    yield row
            if count < _PAGE_ROWS:
                return


def _is_behind(place: Any, following: Any) -> bool:
    try:
        return bool(following > place)
    except TypeError:
        return False

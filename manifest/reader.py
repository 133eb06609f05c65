"""Reading the manifest: everything that asks and changes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from sqlite_utils import Database

from manifest.database import explained, open_for_reading
from manifest.records import Row, ServerStart, Shard, Source, Totals
from manifest.states import Reason, State

TERMINAL = "('stored', 'failed')"
#: Word for word the condition of the index `prompts_unfinished`, or SQLite does not use that.
UNFINISHED = f"state NOT IN {TERMINAL}"
_TALLIES = "SELECT state, reason, num_rows, num_tokens, size_bytes, num_untrained"
_PAGE_ROWS = 10_000
_COLUMNS = (
    "ordinal, source, line, label, key, num_tokens, num_trained, state, reason, detail, "
    "attempts, shard, offset, size_bytes, digest, num_pieces, part, alterations, server"
)


class Reader:
    """An open manifest. Not thread-safe: the thread that opens it is the one that uses it."""

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
        """What the data set is of, by field name; empty for a new manifest."""
        with explained(self.path):
            rows = self._db.execute("SELECT name, value FROM identity").fetchall()
        return {name: json.loads(value) for name, value in rows}

    def sources(self) -> list[Source]:
        with explained(self.path):
            rows = self._db.execute(
                "SELECT number, path, size_bytes, digest, num_rows FROM sources ORDER BY number"
            ).fetchall()
        return [
            Source(number=number, path=path, size_bytes=size, digest=digest, num_rows=num_rows)
            for number, path, size, digest, num_rows in rows
        ]

    def server_starts(self) -> list[ServerStart]:
        """Every start of a server that a session extracted from, in the order of use."""
        with explained(self.path):
            rows = self._db.execute(
                "SELECT number, session, used_at, url, boot_id, facts, canary_error, accepted "
                "FROM server_starts ORDER BY number"
            ).fetchall()
        return [
            ServerStart(
                number=number,
                session=session,
                used_at=used_at,
                url=url,
                boot_id=boot_id,
                facts=json.loads(facts),
                canary_error=canary_error,
                accepted=tuple(json.loads(accepted)),
            )
            for number, session, used_at, url, boot_id, facts, canary_error, accepted in rows
        ]

    def canary(self) -> bytes | None:
        """The dump that canaries are compared with now; None before the first."""
        with explained(self.path):
            row = self._db.execute(
                "SELECT dump FROM canaries ORDER BY server DESC LIMIT 1"
            ).fetchone()
        return None if row is None else bytes(row[0])

    # --- prompts -----------------------------------------------------------------------------

    def settled_ranges(self) -> Iterator[tuple[int, int]]:
        """Ranges [begin, end) of ordinals that need no more work, ascending.

        Rows are planned in order, so that all below the highest are there, and only the few that
        are not finished have to be looked at. Where some are missing, all are.
        """
        with explained(self.path):
            ((last,),) = self._db.execute("SELECT COALESCE(MAX(ordinal), -1) FROM prompts")
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
        """Requests made so far for each unfinished row that has any."""
        with explained(self.path):
            return dict(
                self._db.execute(
                    f"SELECT ordinal, attempts FROM prompts WHERE {UNFINISHED} AND attempts > 0"
                ).fetchall()
            )

    def suspects(self) -> dict[int, int]:
        """Unfinished rows whose request was unanswered when a server died -> how often."""
        with explained(self.path):
            return dict(
                self._db.execute(
                    f"SELECT ordinal, num_deaths FROM prompts WHERE {UNFINISHED} AND num_deaths > 0"
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

    def first_stored(self, count: int) -> list[Row]:
        """The stored rows of the lowest ordinals."""
        with explained(self.path):
            rows = self._db.execute(
                f"SELECT {_COLUMNS} FROM prompts WHERE state = 'stored' ORDER BY ordinal LIMIT ?",
                (count,),
            ).fetchall()
        return [_row(row) for row in rows]

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

    def totals(self, *, with_alterations: bool = True) -> Totals:
        """From the tallies: takes no longer for many rows than for few.

        Counting the alterations reads every row that has one: whoever asks again and again may
        leave them out.
        """
        with explained(self.path):
            tallies = self._db.execute(f"{_TALLIES} FROM tallies WHERE num_rows > 0").fetchall()
            altered = self._db.execute(
                "SELECT alterations, COUNT(*) FROM prompts "
                "WHERE state = 'stored' AND alterations IS NOT NULL AND ? GROUP BY alterations",
                (with_alterations,),
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
        with explained(self.path):
            ((count,),) = self._db.execute(
                # Sorted, which is four times as fast as COUNT(DISTINCT) for millions of keys.
                "SELECT COALESCE(SUM(num_same - 1), 0) FROM (SELECT COUNT(*) AS num_same "
                "FROM prompts WHERE state = 'stored' GROUP BY key)"
            ).fetchall()
        return int(count)

    # --- shards ------------------------------------------------------------------------------

    def shards(self) -> list[Shard]:
        with explained(self.path):
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
        with explained(self.path):
            rows = self._db.execute(
                f"SELECT {_COLUMNS} FROM prompts WHERE shard = ? ORDER BY offset", (number,)
            ).fetchall()
        return [_row(row) for row in rows]

    # --- the file itself ---------------------------------------------------------------------

    def integrity_problems(self) -> list[str]:
        """What SQLite's own check finds, and tallies that do not agree with the rows; empty when
        the file is sound. Reads every row."""
        with explained(self.path):
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
            with explained(self.path):
                page = self._db.execute(sql, [last, _PAGE_ROWS]).fetchall()
            yield from page
            if len(page) < _PAGE_ROWS:
                return
            last = page[-1][0]


def _row(values: tuple[Any, ...]) -> Row:
    names = _COLUMNS.split(", ")
    fields = dict(zip(names, values, strict=True))
    fields["state"] = State(fields["state"])
    fields["reason"] = None if fields["reason"] is None else Reason(fields["reason"])
    fields["alterations"] = tuple(filter(None, (fields["alterations"] or "").split(",")))
    return Row(**fields)

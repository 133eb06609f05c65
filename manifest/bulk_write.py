"""Rows to and from the table `prompts`, any number of them in one step of SQLite.

Python's sqlite3 gives the GIL up at every step and has to win it back from a busy event loop, which
may hold it for 5 ms each time. What takes one step a row therefore costs far more than the work. So
a batch goes to SQLite as one JSON document, in one statement: an INSERT into a view, whose trigger
(the only kind of procedure that SQLite has) does the rest. The view is temporary: it belongs to the
connection and is no part of the file.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from operator import attrgetter

import orjson

from manifest.decoding import PROMPT_COLUMNS, row_checksum
from manifest.exceptions import ManifestDamaged
from manifest.row_changes import Batch, Entry
from manifest.states import Reason, State

_values = attrgetter(*PROMPT_COLUMNS)
_WRITTEN = (*PROMPT_COLUMNS, "checksum")
#: What stays as it was when the row was first written.
_FIXED = ("ordinal", "source", "line", "label", "part")
_ORDINALS = "SELECT value FROM json_each(NEW.ordinals)"
_SHARDS = "SELECT value FROM json_each(NEW.shards)"

_ADD = """ON CONFLICT (state, reason) DO UPDATE SET
        num_rows = num_rows + excluded.num_rows,
        num_tokens = num_tokens + excluded.num_tokens,
        size_bytes = size_bytes + excluded.size_bytes,
        num_untrained = num_untrained + excluded.num_untrained"""
#: Add what the touched rows count for to the tallies, or take it away. By statement and not by a
#: trigger on each row: a batch has hundreds of rows and three or four tallies.
_TALLY = f"""
    INSERT INTO tallies
    SELECT state, COALESCE(reason, ''), {{sign}} COUNT(*), {{sign}} COALESCE(SUM(num_tokens), 0),
        {{sign}} COALESCE(SUM(size_bytes), 0), {{sign}} COALESCE(SUM(num_trained = 0), 0)
    FROM prompts WHERE ordinal IN ({_ORDINALS}) GROUP BY 1, 2
    {_ADD}
"""
#: The same for the samples of the shards in question. (The plus sign keeps SQLite from going by the
#: shard's index, through all of its samples.)
_COUNT_SAMPLES = f"""
    UPDATE shards SET num_samples = num_samples {{sign}}
        (SELECT COUNT(*) FROM prompts WHERE ordinal IN ({_ORDINALS}) AND +shard = number)
    WHERE number IN ({_SHARDS})
"""
_MEASURE_SHARDS = f"""
    UPDATE shards SET end_bytes = COALESCE(
        (SELECT offset + size_bytes FROM prompts WHERE shard = number
         ORDER BY offset DESC LIMIT 1), data_start)
    WHERE number IN ({_SHARDS})
"""
_WRITE = f"""
    INSERT INTO prompts ({", ".join(_WRITTEN)})
    SELECT {", ".join(f"json_extract(value, '$[{place}]')" for place in range(len(_WRITTEN)))}
    FROM json_each(NEW.entries) WHERE true
    ON CONFLICT (ordinal) DO UPDATE SET
    {", ".join(f"{name} = excluded.{name}" for name in _WRITTEN if name not in _FIXED)}
"""
_SCHEMA = f"""
    CREATE TEMP VIEW batches AS SELECT NULL AS ordinals, NULL AS entries, NULL AS shards;
    CREATE TEMP TRIGGER batches_write INSTEAD OF INSERT ON batches BEGIN
        {_TALLY.format(sign="-")};
        {_COUNT_SAMPLES.format(sign="-")};
        {_WRITE};
        {_TALLY.format(sign="+")};
        {_COUNT_SAMPLES.format(sign="+")};
        {_MEASURE_SHARDS};
    END;
"""
_TALLY_AS = f"""
    INSERT INTO tallies
    SELECT ?, '', COALESCE(SUM(num_rows), 0), COALESCE(SUM(num_tokens), 0),
        COALESCE(SUM(size_bytes), 0), COALESCE(SUM(num_untrained), 0)
    FROM tallies WHERE state IN (SELECT value FROM json_each(?))
    {_ADD}
"""
_READ = (
    f"SELECT json_group_array(json_array({', '.join(PROMPT_COLUMNS)})) "
    "FROM prompts WHERE ordinal IN (SELECT value FROM json_each(?))"
)


def prepare(connection: sqlite3.Connection) -> None:
    """Make a connection fit for `write_batch`."""
    connection.executescript(_SCHEMA)


def write_batch(connection: sqlite3.Connection, batch: Batch) -> None:
    """Insert or replace whole rows, and keep the tallies and what shards know of their samples.

    All or nothing; outside of a transaction, durable on return.
    """
    documents = (
        [entry.ordinal for entry in batch.entries],
        [_checked(_values(entry)) for entry in batch.entries],
        batch.shards,
    )
    connection.execute(
        "INSERT INTO batches VALUES (?, ?, ?)", [orjson.dumps(each).decode() for each in documents]
    )


def read_entries(connection: sqlite3.Connection, ordinals: Sequence[int]) -> list[Entry]:
    """The rows of these ordinals, as far as there are any; in no order."""
    ((document,),) = connection.execute(_READ, (orjson.dumps(ordinals).decode(),)).fetchall()
    try:
        entries = [
            Entry(**dict(zip(PROMPT_COLUMNS, values, strict=True)))
            for values in orjson.loads(document)
        ]
        for entry in entries:
            entry.state = State(entry.state)
            entry.reason = None if entry.reason is None else Reason(entry.reason)
    except ValueError as error:
        raise ManifestDamaged(
            f"the manifest holds rows that this tool did not write ({error}). "
            "`extractor verify` names them."
        ) from error
    return entries


def _checked(values: tuple[object, ...]) -> tuple[object, ...]:
    return (*values, row_checksum(PROMPT_COLUMNS, values))


def count_again(connection: sqlite3.Connection) -> None:
    """Recompute the tallies and the shards' sample totals from the rows. Reads every row."""
    connection.execute("DELETE FROM tallies")
    connection.execute(
        "INSERT INTO tallies SELECT state, COALESCE(reason, ''), COUNT(*), "
        "COALESCE(SUM(num_tokens), 0), COALESCE(SUM(size_bytes), 0), "
        "COALESCE(SUM(num_trained = 0), 0) FROM prompts GROUP BY 1, 2"
    )
    connection.execute(
        "UPDATE shards SET num_samples = (SELECT COUNT(*) FROM prompts WHERE shard = number), "
        "end_bytes = COALESCE((SELECT offset + size_bytes FROM prompts WHERE shard = number "
        "ORDER BY offset DESC LIMIT 1), data_start)"
    )


def tally_all_as(
    connection: sqlite3.Connection, state: State, states_before: Sequence[State]
) -> None:
    """Count all that was tallied under `states_before` under `state`."""
    names = orjson.dumps(states_before).decode()
    connection.execute(_TALLY_AS, (state.value, names))
    connection.execute(
        "DELETE FROM tallies WHERE state IN (SELECT value FROM json_each(?))", (names,)
    )

"""Writes and reads rows of the table `prompts`, any number of them in one SQLite step.

Python's sqlite3 releases the GIL at every step and must win it back from a busy event loop, which
may hold it for 5 ms: a step per row would cost far more than the work. So a batch is one JSON
document, inserted into a temporary view whose trigger (SQLite's only procedure) does the rest.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import orjson

from manifest.decoding import PROMPT_COLUMNS, Damage, decode_prompt, encode_prompt
from manifest.exceptions import ManifestDamaged
from manifest.records import Row
from manifest.row_changes import RowBatch
from manifest.states import State

_WRITTEN = (*PROMPT_COLUMNS, "checksum")
#: Columns that keep the value of the first write.
_FIXED = ("ordinal", "source", "line", "label", "part")
_ORDINALS = "SELECT value FROM json_each(NEW.ordinals)"
_SHARDS = "SELECT value FROM json_each(NEW.shards)"

#: The sums that tallies hold, of groups of rows.
_SUMS = """{sign} COUNT(*), {sign} COALESCE(SUM(num_tokens), 0),
        {sign} COALESCE(SUM(size_bytes), 0), {sign} COALESCE(SUM(num_trained = 0), 0)"""
#: The tallies and the samples and end of a shard, as the rows have them. Each reads every row.
TALLIES_OF_ROWS = (
    f"SELECT state, COALESCE(reason, ''), {_SUMS.format(sign='+')} FROM prompts GROUP BY 1, 2"
)
NUM_SAMPLES = "(SELECT COUNT(*) FROM prompts WHERE shard = number)"
END_BYTES = """COALESCE((SELECT offset + size_bytes FROM prompts WHERE shard = number
        ORDER BY offset DESC LIMIT 1), data_start)"""
_ADD = """ON CONFLICT (state, reason) DO UPDATE SET
        num_rows = num_rows + excluded.num_rows,
        num_tokens = num_tokens + excluded.num_tokens,
        size_bytes = size_bytes + excluded.size_bytes,
        num_untrained = num_untrained + excluded.num_untrained"""
#: Add the touched rows to the tallies, or subtract them. One statement instead of a trigger on each
#: row: a batch has hundreds of rows and three or four tallies.
_TALLY = f"""
    INSERT INTO tallies
    SELECT state, COALESCE(reason, ''), {_SUMS}
    FROM prompts WHERE ordinal IN ({_ORDINALS}) GROUP BY 1, 2
    {_ADD}
"""
#: The same for the samples of the touched shards. (The plus sign keeps SQLite from using the index
#: on shards, which would read all of their samples.)
_COUNT_SAMPLES = f"""
    UPDATE shards SET num_samples = num_samples {{sign}}
        (SELECT COUNT(*) FROM prompts WHERE ordinal IN ({_ORDINALS}) AND +shard = number)
    WHERE number IN ({_SHARDS})
"""
_MEASURE_SHARDS = f"UPDATE shards SET end_bytes = {END_BYTES} WHERE number IN ({_SHARDS})"
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
_TALLY_FAILED_AS_PLANNED = f"""
    INSERT INTO tallies
    SELECT '{State.PLANNED.value}', '', COALESCE(SUM(num_rows), 0), COALESCE(SUM(num_tokens), 0),
        COALESCE(SUM(size_bytes), 0), COALESCE(SUM(num_untrained), 0)
    FROM tallies WHERE state = '{State.FAILED.value}'
    {_ADD}
"""
_READ = (
    f"SELECT json_group_array(json_array({', '.join(_WRITTEN)})) "
    "FROM prompts WHERE ordinal IN (SELECT value FROM json_each(?))"
)


def prepare(connection: sqlite3.Connection) -> None:
    """Create the temporary view that `write_batch` needs."""
    connection.executescript(_SCHEMA)


def write_batch(connection: sqlite3.Connection, batch: RowBatch) -> None:
    """Insert or replace whole rows, and update the tallies and the shards' sample totals.

    All or nothing; outside of a transaction, durable on return.
    """
    documents = (
        [row.ordinal for row in batch.rows],
        [encode_prompt(row) for row in batch.rows],
        batch.shards,
    )
    connection.execute(
        "INSERT INTO batches VALUES (?, ?, ?)", [orjson.dumps(each).decode() for each in documents]
    )


def read_rows(connection: sqlite3.Connection, ordinals: Sequence[int]) -> list[Row]:
    """The rows of these ordinals that exist, in any order. Raises ManifestDamaged."""
    ((document,),) = connection.execute(_READ, (orjson.dumps(ordinals).decode(),)).fetchall()
    try:
        rows = [decode_prompt(values) for values in orjson.loads(document)]
    except ValueError as error:
        raise _damaged(error) from error
    damage = next((row for row in rows if isinstance(row, Damage)), None)
    if damage is not None:
        raise _damaged(damage)
    return [row for row in rows if isinstance(row, Row)]


def _damaged(problem: object) -> ManifestDamaged:
    return ManifestDamaged(
        f"the manifest holds rows that this tool did not write ({problem}). "
        "`extractor verify` names them."
    )


def count_again(connection: sqlite3.Connection) -> None:
    """Recompute the tallies and the shards' sample totals from the rows. Reads every row."""
    connection.execute("DELETE FROM tallies")
    connection.execute(f"INSERT INTO tallies {TALLIES_OF_ROWS}")
    connection.execute(f"UPDATE shards SET num_samples = {NUM_SAMPLES}, end_bytes = {END_BYTES}")


def tally_failed_as_planned(connection: sqlite3.Connection) -> None:
    """Move the tallies of all failed rows to PLANNED."""
    connection.execute(_TALLY_FAILED_AS_PLANNED)
    connection.execute("DELETE FROM tallies WHERE state = ?", (State.FAILED.value,))

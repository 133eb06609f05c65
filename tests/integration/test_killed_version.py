"""Reads, resumes and verifies a data set of a version with six states, as a kill left it."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import pytest
from helpers import Ids, Notes, assert_whole, options_for, ordinals_sent, stored_ordinals

from extractor.pipeline.run import run
from extractor.status.overview import read_status
from extractor.testing.fake_server import FakeServer
from extractor.verify.audit import audit
from extractor.verify.findings import FindingKind
from manifest.states import State

#: Killed at a commit, with rows in each state.
KILLED = Path(__file__).parents[1] / "old_version_killed"
PROMPTS = KILLED / "prompts.jsonl"
#: Rows by the state that the old version gave them.
OLD_STATES = {"planned": 17, "sent": 8, "dumped": 8, "verified": 1, "stored": 6}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return Path(shutil.copytree(KILLED / "out", tmp_path / "out"))


def rows_by_state(out: Path) -> dict[str, int]:
    connection = sqlite3.connect(out / "manifest.sqlite")
    try:
        return dict(connection.execute("SELECT state, COUNT(*) FROM prompts GROUP BY 1"))
    finally:
        connection.close()


def test_rows_in_flight_count_as_planned_and_the_files_stay_as_they_are(out: Path) -> None:
    assert rows_by_state(out) == OLD_STATES
    before = (out / "manifest.sqlite").read_bytes()
    status = read_status(out)
    assert status.begun.totals.by_state == {State.PLANNED: 34, State.STORED: 6}
    found = audit(out)
    assert set(found.findings.counts) == {
        FindingKind.ROW_UNFINISHED,
        FindingKind.SHARD_UNSEALED,
    }
    assert found.findings.counts[FindingKind.ROW_UNFINISHED] == 34
    assert (out / "manifest.sqlite").read_bytes() == before


async def test_it_is_resumed_and_finished(out: Path, dump_root: Path, notes: Notes) -> None:
    stored_before = stored_ordinals(out)
    assert len(stored_before) == 6
    async with FakeServer(dump_root).running() as server:
        await run(options_for(server, PROMPTS, out), notes)
        assert sorted(ordinals_sent(server.requests)) == sorted(set(range(40)) - stored_before)
    assert rows_by_state(out) == {"stored": 40}
    rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    assert_whole(out, [Ids(tuple(row["input_ids"]), tuple(row["loss_mask"])) for row in rows])

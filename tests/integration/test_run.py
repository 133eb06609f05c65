"""`run()` against the fake server: every row ends right, whatever goes wrong."""

from __future__ import annotations

import asyncio
import errno
import gzip
import io
import itertools
import os
import random
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO

import numpy as np
import orjson
import pytest
from aiohttp import web
from helpers import (
    LAYOUT,
    Ids,
    Notes,
    assert_whole,
    changed,
    dumps_under,
    make_prompts,
    options_for,
    ordinals_sent,
    quick,
    read_samples,
    rows_of,
    run,
    stored_ordinals,
    stored_rows,
    write_prompts,
)

import extractor.dispatch.health
import extractor.dumps.dump_reader
import extractor.intake.prompt_stream
import extractor.shards.output_dir
import extractor.shards.sequence
from extractor.core.errors import (
    BadDumpDir,
    ConfigMismatch,
    Interrupted,
    OutputBusy,
    PluginError,
    ServerLost,
    ServerUnreachable,
    SpaceError,
    UsageError,
    exit_code,
    first_known,
)
from extractor.core.events import Reporter
from extractor.core.request import Limits, dump_bytes
from extractor.core.rids import PROBE_SESSION
from extractor.core.timings import DEFAULT_TIMINGS, StoreTimings, Timings
from extractor.dispatch.budget import max_prompts
from extractor.pipeline.dry_run import dry_run
from extractor.pipeline.summary import RunSummary
from extractor.shards import output_dir
from extractor.status.reporters import BarReporter, JsonReporter, LineReporter
from extractor.system.lock import exclusive
from extractor.testing.fake_model import FakeModel
from extractor.testing.fake_server import FakeServer
from extractor.testing.faults import LATE_S, Fault, faults_once
from manifest.states import Reason, State
from prompts.types import InputError
from server_patch.directory import Directory
from server_patch.dump_format import Dump, StateLayout, read_beginning

#: Of what is waited for in vain; everything else may take as long as a busy machine takes.
#: Long enough for the dumps of Fault.LATE, which come after their requests were given up.
WAITS_FOR_LATE = quick(collect={"late_dumps_s": 2 * LATE_S})
TIMEOUTS: dict[Fault, dict[str, float]] = {
    Fault.SILENT: {"request_timeout_s": 1.5},
    Fault.LATE: {"request_timeout_s": LATE_S / 2},
    Fault.DRIP: {"request_timeout_s": 1.5},
    Fault.LOST_COPY: {"dump_timeout_s": 1.0},
    Fault.NO_DUMP: {"dump_timeout_s": 1.0},
    Fault.SHORT_DUMP: {"dump_timeout_s": 1.0},
    Fault.TORN_DUMP: {"dump_timeout_s": 1.0},
}


def states_of(summary: RunSummary) -> dict[State, int]:
    return {state: count for state, count in summary.totals.by_state.items() if count}


async def raises_known(task: asyncio.Task[RunSummary]) -> BaseException:
    """What a user would be shown of the error that ended the run."""
    with pytest.raises(BaseException) as caught:
        await task
    return first_known(caught.value)


# --- all is well ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    [
        LAYOUT,
        StateLayout(boundaries=(0,), hidden_size=6, dtype="F32", last_kind="both"),
        StateLayout(boundaries=(2, 3), hidden_size=10, dtype="F16", last_kind="pre"),
    ],
    ids=lambda layout: f"{layout.dtype}-{layout.last_kind}",
)
async def test_every_prompt_is_stored_with_its_own_states(
    tmp_path: Path, dump_root: Path, notes: Notes, layout: StateLayout
) -> None:
    prompts = make_prompts(60)
    async with FakeServer(dump_root, model=FakeModel(layout=layout)).running() as server:
        path = write_prompts(tmp_path / "p.jsonl", prompts)
        summary = await run(options_for(server, path, tmp_path / "out"), notes)
    assert states_of(summary) == {State.STORED: 60}
    assert summary.totals.stored_tokens == sum(len(row.ids) for row in prompts)
    assert_whole(tmp_path / "out", prompts, layout=layout)
    assert dumps_under(dump_root) == []
    assert len(ordinals_sent(server.requests)) == 60
    assert notes.is_closed


@pytest.mark.parametrize("kind", [BarReporter, LineReporter, JsonReporter])
async def test_a_terminal_that_went_away_ends_no_run(
    tmp_path: Path, dump_root: Path, kind: Callable[[TextIO], Reporter]
) -> None:
    """An ssh connection that broke: whatever is written to such a terminal fails with EIO."""
    prompts = make_prompts(10)
    master, slave = os.openpty()
    terminal = os.fdopen(slave, "w", buffering=1)
    os.close(master)
    try:
        async with FakeServer(dump_root).running() as server:
            path = write_prompts(tmp_path / "p.jsonl", prompts)
            await run(options_for(server, path, tmp_path / "out"), kind(terminal))
    finally:
        with suppress(OSError):  # what could not be written is in its buffer still
            terminal.close()
    assert_whole(tmp_path / "out", prompts)


async def test_pieces_may_come_in_any_order(tmp_path: Path, dump_root: Path, notes: Notes) -> None:
    prompts = make_prompts(40, longest=50)
    async with FakeServer(dump_root, chunk_tokens=7).running() as server:
        path = write_prompts(tmp_path / "p.jsonl", prompts)
        await run(options_for(server, path, tmp_path / "out"), notes)
    assert_whole(tmp_path / "out", prompts)
    pieces = {row.ordinal: row.sample.num_pieces for row in stored_rows(tmp_path / "out")}
    assert pieces == {n: -(-len(row.ids) // 7) for n, row in enumerate(prompts)}
    assert dumps_under(dump_root) == []


@pytest.mark.parametrize("undivided_bytes", [0, DEFAULT_TIMINGS.store.undivided_bytes])
async def test_many_small_shards_hold_what_one_would(
    undivided_bytes: int, tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    timings = Timings(store=StoreTimings(undivided_bytes=undivided_bytes))
    prompts = make_prompts(60, shortest=20)
    async with FakeServer(dump_root).running() as server:
        path = write_prompts(tmp_path / "p.jsonl", prompts)
        options = options_for(server, path, tmp_path / "out", shard_bytes=60_000, num_movers=2)
        await run(options, notes, timings=timings)
    assert_whole(tmp_path / "out", prompts)
    shards = list((tmp_path / "out" / "shards").iterdir())
    assert len(shards) > 4
    assert all(shard.stat().st_size <= 60_000 for shard in shards)


async def test_a_sample_larger_than_a_shard_gets_one_of_its_own(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    prompts = make_prompts(6, shortest=30)
    async with FakeServer(dump_root).running() as server:
        path = write_prompts(tmp_path / "p.jsonl", prompts)
        await run(options_for(server, path, tmp_path / "out", shard_bytes=1), notes)
    assert_whole(tmp_path / "out", prompts)
    assert len(list((tmp_path / "out" / "shards").iterdir())) == 6


async def test_equal_prompts_are_both_stored_and_counted(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    prompts = make_prompts(3)
    prompts.append(prompts[0])
    async with FakeServer(dump_root).running() as server:
        path = write_prompts(tmp_path / "p.jsonl", prompts)
        summary = await run(options_for(server, path, tmp_path / "out"), notes)
    assert summary.duplicates == 1
    assert_whole(tmp_path / "out", prompts)


async def test_bad_rows_fail_with_file_line_and_reason_and_the_rest_goes_on(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    prompts = make_prompts(4)
    path = write_prompts(tmp_path / "p.jsonl", prompts)
    long = "[" + ", ".join(["1"] * 5000) + "]"
    with path.open("a") as file:
        file.write('{"input_ids": [1, 2\n')  # row 4
        file.write('{"input_ids": [5, 1000, 6]}\n')  # row 5
        file.write(f'{{"input_ids": {long}}}\n')  # row 6
        file.write('{"messages": [{"role": "wizard", "content": "hi"}]}\n')  # row 7
        file.write('{"input_ids": []}\n')  # row 8
    async with FakeServer(dump_root).running() as server:
        summary = await run(options_for(server, path, tmp_path / "out"), notes)
    assert states_of(summary) == {State.STORED: 4, State.FAILED: 5}
    failed = {row.ordinal: row.reason for row in rows_of(tmp_path / "out") if row.reason}
    assert failed == {
        4: Reason.BAD_JSON,
        5: Reason.TOKEN_OUT_OF_RANGE,
        6: Reason.TOO_LONG,
        7: failed[7],  # what the renderer for ids alone says of a chat
        8: Reason.EMPTY_PROMPT,
    }
    assert sorted(ordinals_sent(server.requests)) == [0, 1, 2, 3]
    assert any(message.startswith(f"{path}:5: bad_json: ") for message in notes.messages)
    assert any(
        message == f"{path}:6: token_out_of_range: token 1 is 1000, the vocabulary has 1000"
        for message in notes.messages
    )
    assert_whole(tmp_path / "out", prompts + [prompts[0]] * 5, without=range(4, 9))


async def test_a_finished_run_is_not_begun_again(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    prompts = make_prompts(10)
    path = write_prompts(tmp_path / "p.jsonl", prompts)
    async with FakeServer(dump_root).running() as server:
        await run(options_for(server, path, tmp_path / "out"), notes)
    async with FakeServer(dump_root).running() as server:
        summary = await run(options_for(server, path, tmp_path / "out"), notes)
        assert states_of(summary) == {State.STORED: 10}
        assert server.requests == []
        options = options_for(server, path, tmp_path / "out")
    summary = await run(options, notes)  # nobody answers there any more
    assert states_of(summary) == {State.STORED: 10}
    assert_whole(tmp_path / "out", prompts)


# --- bounds -----------------------------------------------------------------------------------


class MeasuringServer(FakeServer):
    """Knows the most bytes of dumps that ever lay under its directory."""

    peak_bytes = 0

    def _publish(self, name: str, data: bytes) -> None:
        super()._publish(name, data)
        used = sum(
            entry.stat().st_size
            for entry in os.scandir(self.directory)
            if entry.name != "READY.json"
        )
        self.peak_bytes = max(self.peak_bytes, used)


@pytest.mark.parametrize("chunk_tokens", [0, 8])
async def test_dumps_never_exceed_the_byte_budget(
    tmp_path: Path, dump_root: Path, notes: Notes, chunk_tokens: int
) -> None:
    model = FakeModel(
        layout=StateLayout(boundaries=(1, 2, 3), hidden_size=512, dtype="BF16", last_kind="post"),
        context_length=64,
    )
    limits = Limits(max_prompt_tokens=57, vocab_size=1000, chunk_tokens=chunk_tokens or 57)
    budget = 2 * dump_bytes(57, model.layout, limits)
    prompts = make_prompts(60, shortest=20, longest=57)
    server = MeasuringServer(dump_root, model=model, chunk_tokens=chunk_tokens)
    async with server.running():
        path = write_prompts(tmp_path / "p.jsonl", prompts)
        options = options_for(
            server, path, tmp_path / "out", shm_budget_bytes=budget, concurrency=32
        )
        summary = await run(options, notes)
    assert states_of(summary) == {State.STORED: 60}
    # The budget was needed, so that the test is about something.
    assert budget // 2 < summary.counters.now.peak_shm_bytes <= budget
    assert budget // 4 < server.peak_bytes <= budget


async def test_dumps_of_failed_attempts_give_their_room_back(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    """An answer that tells of a failure comes after a whole dump, which nobody wants."""
    model = FakeModel(
        layout=StateLayout(boundaries=(1, 2, 3), hidden_size=512, dtype="BF16", last_kind="post"),
        context_length=64,
    )
    limits = Limits(max_prompt_tokens=57, vocab_size=1000, chunk_tokens=57)
    budget = 2 * dump_bytes(57, model.layout, limits)
    prompts = make_prompts(40, shortest=50, longest=57)

    def truncated(number: int, rid: str) -> Fault | None:
        return Fault.TRUNCATED if number >= 1 and number % 2 else None

    server = MeasuringServer(dump_root, model=model, faults=truncated)
    async with server.running():
        path = write_prompts(tmp_path / "p.jsonl", prompts)
        options = options_for(server, path, tmp_path / "out", shm_budget_bytes=budget)
        summary = await run(options, notes)
    assert summary.totals.by_reason == {Reason.TRUNCATED: 20}
    assert server.peak_bytes <= budget
    assert dumps_under(dump_root) == []


async def test_a_prompt_that_no_budget_can_hold_fails_as_too_large(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    prompts = make_prompts(2, shortest=3, longest=3) + make_prompts(1, shortest=4000, longest=4000)
    async with FakeServer(dump_root).running() as server:
        path = write_prompts(tmp_path / "p.jsonl", prompts)
        options = options_for(server, path, tmp_path / "out", shm_budget_bytes=150_000)
        summary = await run(options, notes)
    assert summary.totals.by_reason == {Reason.TOO_LARGE: 1}
    assert sorted(ordinals_sent(server.requests)) == [0, 1]


async def test_requests_in_flight_reach_the_concurrency_and_no_more(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    async with FakeServer(dump_root, delay_s=0.02).running() as server:
        path = write_prompts(tmp_path / "p.jsonl", make_prompts(60))
        await run(options_for(server, path, tmp_path / "out", concurrency=5), notes)
    assert server.peak_concurrency == 5


async def test_after_a_signal_only_what_is_in_flight_ends(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    """However many prompts are ready and wait for their turn."""

    def interrupt(number: int, rid: str) -> Fault | None:
        if number == 20:
            os.kill(os.getpid(), signal.SIGINT)
        return None

    prompts = make_prompts(100)
    async with FakeServer(dump_root, delay_s=0.05, faults=interrupt).running() as server:
        path = write_prompts(tmp_path / "p.jsonl", prompts)
        options = options_for(server, path, tmp_path / "out", concurrency=4)
        with pytest.raises(Interrupted):
            await run(options, notes)
        # Those in flight, and what took the place of those answered in the same moment.
        assert len(server.requests) <= 21 + 2 * 4
        assert len(stored_ordinals(tmp_path / "out")) == len(server.requests) - 1  # the probe
        await run(options, notes)
    assert_whole(tmp_path / "out", prompts)


async def test_prompts_in_memory_are_bounded_by_the_concurrency(
    tmp_path: Path, dump_root: Path, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def count_tasks(number: int, rid: str) -> Fault | None:
        names = [task.get_name() for task in asyncio.all_tasks()]
        seen.append(sum(name.startswith("prompt-") for name in names))
        return None

    async with FakeServer(dump_root, delay_s=0.01, faults=count_tasks).running() as server:
        path = write_prompts(tmp_path / "p.jsonl", make_prompts(2 * max_prompts(4)))
        await run(options_for(server, path, tmp_path / "out", concurrency=4), notes)
    assert 4 <= max(seen) <= max_prompts(4)


# --- faults -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "requests", "reason"),
    [
        (Fault.BUSY, 2, None),
        (Fault.ERROR, 2, None),
        (Fault.REJECT, 1, Reason.REJECTED),
        (Fault.RESET, 2, None),
        (Fault.SILENT, 2, None),
        (Fault.TOO_MANY, 2, None),
        (Fault.LATE, 2, None),
        (Fault.DUPLICATE, 1, None),
        (Fault.LOST_COPY, 2, None),
        (Fault.QUEUE_ABORT, 2, None),
        (Fault.ODD_REPLY, 2, None),
        (Fault.LOCKED, 2, None),
        (Fault.DRIP, 2, None),
        (Fault.CLOSE, 1, None),
        (Fault.OTHER_RID, 2, None),
        (Fault.NO_DUMP, 2, None),
        (Fault.SHORT_DUMP, 2, None),
        (Fault.DOUBLE_DUMP, 1, None),
        (Fault.WRONG_IDS, 2, None),
        (Fault.NONFINITE, 2, None),
        (Fault.WRONG_BOUNDARIES, 1, Reason.WRONG_LAYOUT),
        (Fault.ERROR_RECORD, 2, None),
        (Fault.TORN_DUMP, 2, None),
        (Fault.CACHED, 2, None),
        (Fault.TRUNCATED, 1, Reason.TRUNCATED),
    ],
    ids=lambda value: value if isinstance(value, Fault) else "",
)
async def test_a_passing_fault_costs_one_request_and_a_lasting_one_the_row(
    tmp_path: Path,
    dump_root: Path,
    notes: Notes,
    fault: Fault,
    requests: int,
    reason: Reason | None,
) -> None:
    prompts = make_prompts(1, shortest=20)
    # Request 0 is the probe.
    async with FakeServer(dump_root, faults=faults_once({1: fault})).running() as server:
        path = write_prompts(tmp_path / "p.jsonl", prompts)
        options = options_for(server, path, tmp_path / "out", **TIMEOUTS.get(fault, {}))
        summary = await run(options, notes, timings=WAITS_FOR_LATE)
    assert len(ordinals_sent(server.requests)) == requests
    assert len(set(server.requests)) == len(server.requests)  # a rid names one attempt
    assert summary.totals.by_reason == ({} if reason is None else {reason: 1})
    assert_whole(tmp_path / "out", prompts, without=[] if reason is None else [0])
    assert dumps_under(dump_root) == []


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault.ERROR, Reason.SERVER_ERROR),
        (Fault.SILENT, Reason.SERVER_ERROR),
        (Fault.DRIP, Reason.SERVER_ERROR),
        (Fault.ODD_REPLY, Reason.SERVER_ERROR),
        (Fault.NO_DUMP, Reason.DUMP_MISSING),
        (Fault.SHORT_DUMP, Reason.DUMP_MISSING),
        (Fault.WRONG_IDS, Reason.WRONG_TOKENS),
        (Fault.NONFINITE, Reason.NONFINITE),
        (Fault.ERROR_RECORD, Reason.DUMP_FAILED),
        (Fault.TORN_DUMP, Reason.DUMP_MISSING),
        (Fault.CACHED, Reason.CACHED),
    ],
)
async def test_a_row_whose_every_attempt_fails_is_given_up_with_the_reason(
    tmp_path: Path, dump_root: Path, notes: Notes, fault: Fault, reason: Reason
) -> None:
    prompts = make_prompts(3, shortest=5)

    def first_row_fails(number: int, rid: str) -> Fault | None:
        return fault if ordinals_sent([rid]) == [0] else None

    async with FakeServer(dump_root, faults=first_row_fails).running() as server:
        path = write_prompts(tmp_path / "p.jsonl", prompts)
        options = options_for(
            server, path, tmp_path / "out", max_attempts=2, **TIMEOUTS.get(fault, {})
        )
        summary = await run(options, notes)
    assert summary.totals.by_reason == {reason: 1}
    assert sorted(ordinals_sent(server.requests)) == [0, 0, 1, 2]
    row = rows_of(tmp_path / "out")[0]
    assert (row.state, row.reason, row.attempts) == (State.FAILED, reason, 2)
    assert_whole(tmp_path / "out", prompts, without=[0])
    assert dumps_under(dump_root) == []


@pytest.mark.parametrize("fault", [Fault.BUSY, Fault.RESET, Fault.QUEUE_ABORT, Fault.LOST_COPY])
async def test_trouble_that_is_not_the_prompts_costs_it_no_attempt(
    tmp_path: Path, dump_root: Path, notes: Notes, fault: Fault
) -> None:
    prompts = make_prompts(1)
    sent: list[int] = []

    def first_six(number: int, rid: str) -> Fault | None:
        sent.extend(ordinals_sent([rid]))  # a probe is served
        return fault if ordinals_sent([rid]) and len(sent) <= 6 else None

    async with FakeServer(dump_root, faults=first_six).running() as server:
        path = write_prompts(tmp_path / "p.jsonl", prompts)
        options = options_for(server, path, tmp_path / "out", max_attempts=1, dump_timeout_s=0.2)
        await run(options, notes)
    assert len(ordinals_sent(server.requests)) == 7
    assert_whole(tmp_path / "out", prompts)


@pytest.mark.parametrize(
    "fault", [Fault.BUSY, Fault.TOO_MANY, Fault.RESET, Fault.ERROR, Fault.LOCKED, Fault.QUEUE_ABORT]
)
async def test_a_server_that_serves_nothing_ends_the_run_and_no_row_fails_for_it(
    tmp_path: Path,
    dump_root: Path,
    notes: Notes,
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault,
) -> None:
    """For ever is not for ever, and the rows are not to blame."""
    timings = quick(health={"gone_after_s": 0.5, "useless_after_s": 0.5})
    prompts = make_prompts(40)
    path = write_prompts(tmp_path / "p.jsonl", prompts)

    def from_10_on(number: int, rid: str) -> Fault | None:
        return fault if number >= 10 else None

    async with FakeServer(dump_root, faults=from_10_on).running() as server:
        options = options_for(server, path, tmp_path / "out", concurrency=4)
        error = await raises_known(asyncio.create_task(run(options, notes, timings=timings)))
    assert isinstance(error, ServerLost)
    assert "served nothing for" in str(error) or "has not answered for" in str(error)
    rows = rows_of(tmp_path / "out")
    assert State.FAILED not in {row.state for row in rows}
    async with FakeServer(dump_root).running() as server:
        await run(options_for(server, path, tmp_path / "out"), notes, timings=timings)
    assert_whole(tmp_path / "out", prompts)
    assert dumps_under(dump_root) == []


async def test_where_everything_is_refused_a_probe_alone_asks_and_the_user_is_told(
    tmp_path: Path, dump_root: Path, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    timings = quick(health={"refused_open_s": 0.2})
    prompts = make_prompts(40)
    path = write_prompts(tmp_path / "p.jsonl", prompts)
    refused: list[str] = []

    def busy_until_probed(number: int, rid: str) -> Fault | None:
        if number < 10 or sum(PROBE_SESSION in rid for rid in refused) >= 2:
            return None
        refused.append(rid)
        return Fault.BUSY

    async with FakeServer(dump_root, faults=busy_until_probed).running() as server:
        await run(options_for(server, path, tmp_path / "out"), notes, timings=timings)
    assert_whole(tmp_path / "out", prompts)
    told = "\n".join(notes.messages)
    assert "is failing all requests (last: HTTP 503: queue is full); pausing it" in told
    assert "serves again" in told
    assert notes.of_servers[:2] == [
        ("server_silent", "warning", server.url),
        ("server_back", "info", server.url),
    ]
    first_probe = next(i for i, rid in enumerate(refused) if PROBE_SESSION in rid)
    # What was on its way when the circuit opened may still be refused.
    assert sum(PROBE_SESSION not in rid for rid in refused[first_probe:]) <= 64


async def test_a_probe_that_is_refused_is_sent_again(
    tmp_path: Path, dump_root: Path, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    timings = quick(probe={"busy_pause_s": 0.01})
    prompts = make_prompts(3)
    faults = faults_once(dict.fromkeys(range(3), Fault.BUSY))
    async with FakeServer(dump_root, faults=faults).running() as server:
        path = write_prompts(tmp_path / "p.jsonl", prompts)
        await run(options_for(server, path, tmp_path / "out"), notes, timings=timings)
    assert_whole(tmp_path / "out", prompts)


async def test_a_probe_that_is_refused_for_ever_ends_the_run(
    tmp_path: Path, dump_root: Path, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    timings = quick(probe={"busy_pause_s": 0.01, "timeout_s": 0.2})
    async with FakeServer(dump_root, faults=lambda number, rid: Fault.BUSY).running() as server:
        path = write_prompts(tmp_path / "p.jsonl", make_prompts(3))
        with pytest.raises(ServerLost, match=r"refused the probe prompt.*queue is full"):
            await run(options_for(server, path, tmp_path / "out"), notes, timings=timings)


@pytest.mark.parametrize(
    ("fault", "num_requests"), [(Fault.ERROR, 4), (Fault.RESET, 64), (Fault.BUSY, 64)]
)
async def test_prompts_that_alone_are_not_served_fail_and_the_rest_goes_on(
    tmp_path: Path,
    dump_root: Path,
    notes: Notes,
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault,
    num_requests: int,
) -> None:
    """However many of them: a probe that is served tells that the server is well."""
    timings = quick(health={"trial_after_s": 0.0, "alive_interval_s": 0.01})
    bad = {2, 3, 5, 7}
    prompts = make_prompts(30)
    path = write_prompts(tmp_path / "p.jsonl", prompts)

    def for_some(number: int, rid: str) -> Fault | None:
        return fault if set(ordinals_sent([rid])) & bad else None

    async with FakeServer(dump_root, faults=for_some).running() as server:
        summary = await run(options_for(server, path, tmp_path / "out"), notes, timings=timings)
    assert summary.totals.by_reason == {Reason.SERVER_ERROR: len(bad)}
    sent = ordinals_sent(server.requests)
    assert min(sent.count(ordinal) for ordinal in bad) >= num_requests
    assert fault is not Fault.ERROR or max(sent.count(ordinal) for ordinal in bad) == num_requests
    assert {sent.count(ordinal) for ordinal in set(range(30)) - bad} == {1}
    assert_whole(tmp_path / "out", prompts, without=bad)


async def test_refusals_lower_the_number_of_requests_in_flight(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    prompts = make_prompts(60)
    path = write_prompts(tmp_path / "p.jsonl", prompts)
    in_flight: list[int] = []

    class Narrow(FakeServer):
        """Refuses what exceeds two requests at a time."""

        async def _generate(self, request: web.Request) -> web.StreamResponse:
            in_flight.append(self.num_at_work)
            return await super()._generate(request)

    def when_crowded(number: int, rid: str) -> Fault | None:
        return Fault.BUSY if server.num_at_work > 2 else None

    server = Narrow(dump_root, faults=when_crowded, delay_s=0.005)
    async with server.running():
        summary = await run(options_for(server, path, tmp_path / "out", concurrency=16), notes)
    assert states_of(summary) == {State.STORED: 60}
    # The first burst is sixteen wide; behind it the width hovers about what is served.
    assert max(in_flight[:20]) > 8
    assert sum(in_flight[40:]) / len(in_flight[40:]) < 6
    assert_whole(tmp_path / "out", prompts)


async def test_duplicates_of_pieces_never_make_a_sample(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    """A request that the server retracts and prefills again gives some rows twice."""
    prompts = make_prompts(30, shortest=20)

    def often(number: int, rid: str) -> Fault | None:
        return Fault.DOUBLE_DUMP if number % 3 == 1 else None

    async with FakeServer(dump_root, chunk_tokens=8, faults=often).running() as server:
        path = write_prompts(tmp_path / "p.jsonl", prompts)
        await run(options_for(server, path, tmp_path / "out", max_attempts=9), notes)
    assert len(ordinals_sent(server.requests)) > 30
    assert_whole(tmp_path / "out", prompts)
    assert dumps_under(dump_root) == []


async def test_a_gateway_that_sends_everything_twice_costs_nothing(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    """The reply is for the second copy, the dump from the first; also for probes."""
    prompts = make_prompts(30)
    faults: list[Fault] = []

    def always(number: int, rid: str) -> Fault:
        faults.append(Fault.DUPLICATE)
        return faults[-1]

    async with FakeServer(dump_root, chunk_tokens=8, faults=always).running() as server:
        path = write_prompts(tmp_path / "p.jsonl", prompts)
        await run(options_for(server, path, tmp_path / "out", max_attempts=1), notes)
        assert server.aborted == []
    assert len(faults) == 31
    assert sorted(ordinals_sent(server.requests)) == list(range(30))
    assert_whole(tmp_path / "out", prompts)
    assert dumps_under(dump_root) == []


async def test_a_probe_that_a_gateway_sends_twice_still_resumes_the_server(
    tmp_path: Path, dump_root: Path, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    timings = quick(health={"refused_open_s": 0.0})
    prompts = make_prompts(5)

    def plan(number: int, rid: str) -> Fault | None:
        if PROBE_SESSION in rid:
            return Fault.DUPLICATE
        return Fault.BUSY if len(probes_in(server.requests)) < 2 else None

    def probes_in(rids: list[str]) -> list[str]:
        return [rid for rid in rids if PROBE_SESSION in rid]

    server = FakeServer(dump_root, faults=plan)
    async with server.running():
        path = write_prompts(tmp_path / "p.jsonl", prompts)
        await run(options_for(server, path, tmp_path / "out"), notes, timings=timings)
    assert len(probes_in(server.requests)) == 2
    assert_whole(tmp_path / "out", prompts)
    assert dumps_under(dump_root) == []


async def test_every_fault_at_once_ends_with_every_row_settled(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    prompts = make_prompts(120)
    kinds = [fault for fault in Fault if fault is not Fault.DIE]  # this process is the server's

    def mixed(number: int, rid: str) -> Fault | None:
        return kinds[number // 3 % len(kinds)] if number % 3 == 1 else None

    async with FakeServer(dump_root, chunk_tokens=16, faults=mixed).running() as server:
        path = write_prompts(tmp_path / "p.jsonl", prompts)
        # Chance alone must not use up a row's attempts.
        options = options_for(
            server,
            path,
            tmp_path / "out",
            concurrency=16,
            max_attempts=99,
            request_timeout_s=LATE_S / 2,
            dump_timeout_s=0.3,
        )
        summary = await run(options, notes, timings=WAITS_FOR_LATE)
    assert summary.totals.num_rows == 120
    assert set(summary.totals.by_reason) <= {
        Reason.REJECTED, Reason.WRONG_LAYOUT, Reason.TRUNCATED,
    }  # fmt: skip
    failed = {row.ordinal for row in rows_of(tmp_path / "out") if row.state is State.FAILED}
    assert_whole(tmp_path / "out", prompts, without=failed)
    assert dumps_under(dump_root) == []


async def test_other_runs_dumps_are_left_alone(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    async with FakeServer(dump_root).running() as server:
        server.dump("xtr-another-session-0-1", np.arange(5, dtype=np.int32))
        path = write_prompts(tmp_path / "p.jsonl", make_prompts(5))
        await run(options_for(server, path, tmp_path / "out"), notes)
    assert len(dumps_under(dump_root)) == 1


@pytest.mark.parametrize("is_dead", [False, True])
async def test_other_runs_dumps_are_opened_once_however_often_a_run_looks(
    tmp_path: Path,
    dump_root: Path,
    notes: Notes,
    monkeypatch: pytest.MonkeyPatch,
    is_dead: bool,
) -> None:
    """Probe, collector and their final sweeps share one read of each file, or none if files of
    this run cannot be among them."""
    opened: Counter[Path] = Counter()

    def counting(directory: Directory, name: str, *, whole_bytes: int) -> tuple[Dump, bytes]:
        opened[directory.path / name] += 1
        return read_beginning(directory, name, whole_bytes=whole_bytes)

    monkeypatch.setattr(extractor.dumps.dump_reader, "read_beginning", counting)
    prompts = make_prompts(20)
    path = write_prompts(tmp_path / "p.jsonl", prompts)

    def others_dump(server: FakeServer) -> set[Path]:
        for number in range(300):
            server.dump(f"xtr-another-session-{number}-1", np.arange(2, dtype=np.int32))
        return set(server.directory.glob("*.safetensors"))

    async with FakeServer(dump_root, faults=faults_once({9: Fault.REJECT})).running() as server:
        others = others_dump(server)
        await run(options_for(server, path, tmp_path / "out"), notes)
        assert not others & set(opened)
        assert (
            sum(opened.values()) == 2 + 19
        )  # the probe's dump twice, to read and remove it; the prompts' once
        opened.clear()
        if not is_dead:
            await run(options_for(server, path, tmp_path / "out", retry_failed=True), notes)
    if is_dead:
        declare_dead(server)
        async with FakeServer(dump_root, boot_id="another").running() as other:
            await run(options_for(other, path, tmp_path / "out", retry_failed=True), notes)
    assert {opened[path] for path in others} == {1}
    assert set(server.directory.glob("*.safetensors")) == others
    assert_whole(tmp_path / "out", prompts)


# --- resume -----------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 2, 17, 40, 60])
async def test_a_run_that_was_cut_off_goes_on_where_it_stopped(
    tmp_path: Path, dump_root: Path, notes: Notes, at: int
) -> None:
    prompts = make_prompts(60)
    path = write_prompts(tmp_path / "p.jsonl", prompts)
    tasks: list[asyncio.Task[RunSummary]] = []

    def cut_off(number: int, rid: str) -> Fault | None:
        if number == at:
            tasks[0].cancel()
        return None

    async with FakeServer(dump_root, faults=cut_off, delay_s=0.001).running() as server:
        options = options_for(server, path, tmp_path / "out", shard_bytes=40_000)
        tasks.append(asyncio.create_task(run(options, notes)))
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        assert dumps_under(dump_root) == []
    kept = stored_ordinals(tmp_path / "out")
    async with FakeServer(dump_root).running() as server:
        options = options_for(server, path, tmp_path / "out", shard_bytes=40_000)
        summary = await run(options, notes)
    assert sorted(ordinals_sent(server.requests)) == sorted(set(range(60)) - kept)
    assert summary.counters.rows.settled_before == len(kept)
    assert_whole(tmp_path / "out", prompts)
    assert dumps_under(dump_root) == []


@pytest.mark.parametrize(
    ("field", "model"),
    [
        ("boundaries", FakeModel(layout=replace(LAYOUT, boundaries=(0, 2, 3)))),
        ("hidden_size", FakeModel(layout=replace(LAYOUT, hidden_size=10))),
        ("dtype", FakeModel(layout=replace(LAYOUT, dtype="F16"))),
        ("last_kind", FakeModel(layout=replace(LAYOUT, last_kind="both"))),
        ("vocab_size", FakeModel(vocab_size=1001)),
        ("num_layers", FakeModel(num_layers=5)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_another_server_configuration_is_refused_by_field(
    tmp_path: Path, dump_root: Path, notes: Notes, field: str, model: FakeModel
) -> None:
    path = write_prompts(tmp_path / "p.jsonl", make_prompts(5))
    async with FakeServer(dump_root).running() as server:
        await run(options_for(server, path, tmp_path / "out"), notes)
    async with FakeServer(dump_root, model=model).running() as server:
        with pytest.raises(ConfigMismatch, match=rf"\n  {field}: "):
            await run(options_for(server, path, tmp_path / "out"), notes)
        assert server.requests == []


@pytest.mark.parametrize("is_server_there", [True, False])
@pytest.mark.parametrize("rows", [5, 6, 4])
async def test_a_changed_prompt_file_is_refused(
    tmp_path: Path, dump_root: Path, notes: Notes, is_server_there: bool, rows: int
) -> None:
    path = write_prompts(tmp_path / "p.jsonl", make_prompts(5))
    async with FakeServer(dump_root).running() as server:
        await run(options_for(server, path, tmp_path / "out"), notes)
        write_prompts(path, make_prompts(rows, seed=1))
        if is_server_there:
            with pytest.raises(
                ConfigMismatch, match=r"\n  inputs: the content of .*p.jsonl is not"
            ):
                await run(options_for(server, path, tmp_path / "out"), notes)
    if not is_server_there:
        with pytest.raises((ConfigMismatch, ServerUnreachable)):
            await run(options_for(server, path, tmp_path / "out"), notes)


def as_lines(rows: list[dict[str, object]]) -> bytes:
    return b"".join(orjson.dumps(row) + b"\n" for row in rows)


def as_lines_in_gzip(rows: list[dict[str, object]]) -> bytes:
    return gzip.compress(as_lines(rows), 1)


def as_parquet(rows: list[dict[str, object]]) -> bytes:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=16, compression="none")
    return sink.getvalue()


class OverwritingServer(FakeServer):
    """Calls a function when the third prompt arrives, and records the ids of all prompts."""

    def __init__(self, dump_root: Path, act: Callable[[], None]) -> None:
        super().__init__(dump_root)
        self.sent: list[list[int]] = []
        self._act = act

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self.sent.append((await request.json())["input_ids"])
        if len(self.sent) == 3:
            self._act()
        return await super()._generate(request)


@pytest.mark.slow
@pytest.mark.parametrize("form", [as_lines, orjson.dumps, as_lines_in_gzip, as_parquet])
async def test_prompts_of_a_file_that_is_overwritten_during_a_run_are_not_sent(
    tmp_path: Path,
    dump_root: Path,
    notes: Notes,
    monkeypatch: pytest.MonkeyPatch,
    form: Callable[[list[dict[str, object]]], bytes],
) -> None:
    """The file is overwritten in place, with the same size and the old times."""
    timings = quick(dispatch={"read_rows": 8})
    filler = random.Random(0).randbytes(8 << 20).hex()

    def content(low: int) -> bytes:
        return form(
            [
                {"input_ids": [low, low + n % 100], "more": filler[n << 16 : (n + 1) << 16]}
                for n in range(256)
            ]
        )

    path, old = tmp_path / "p.jsonl", content(100)
    path.write_bytes(old)
    times = path.stat()

    def overwrite() -> None:
        with path.open("r+b") as file:
            file.write(content(500))
            file.truncate()
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    prompts = [Ids(ids=(100, 100 + n % 100), mask=(1, 1)) for n in range(256)]
    server = OverwritingServer(dump_root, overwrite)
    async with server.running():
        options = options_for(server, path, tmp_path / "out", concurrency=4)
        error = await raises_known(asyncio.create_task(run(options, notes, timings=timings)))
        assert isinstance(error, InputError) and exit_code(error) == 2
        assert str(error).startswith(f"{path}: changed after it was scanned. No prompt was made")
        assert 3 <= len(server.sent) < 256
        assert all(max(ids) < 500 for ids in server.sent[1:])  # the first is a probe
        for ordinal, sample in read_samples(tmp_path / "out").items():
            assert sample.ids == prompts[ordinal].ids
        with pytest.raises(ConfigMismatch, match=r"\n  inputs: the content of .*p.jsonl is not"):
            await run(options, notes, timings=timings)
        path.write_bytes(old)
        await run(options, notes, timings=timings)
    assert_whole(tmp_path / "out", prompts)


async def test_a_second_run_on_the_same_directory_says_who_has_it(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    (tmp_path / "out").mkdir()
    async with FakeServer(dump_root).running() as server:
        path = write_prompts(tmp_path / "p.jsonl", make_prompts(5))
        with (
            exclusive(tmp_path / "out"),
            pytest.raises(OutputBusy, match=f"process {os.getpid()}"),
        ):
            await run(options_for(server, path, tmp_path / "out"), notes)
        await run(options_for(server, path, tmp_path / "out"), notes)


# --- what a resume finds ----------------------------------------------------------------------


async def test_a_shard_that_was_not_sealed_before_the_end_is_sealed_by_a_resume(
    tmp_path: Path, dump_root: Path, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the last commit and the seal: no row is left to do, the shard is."""
    prompts = make_prompts(8)
    path = write_prompts(tmp_path / "p.jsonl", prompts)

    async def killed(self: object) -> None:
        raise KeyError("stands in for a kill")

    async with FakeServer(dump_root).running() as server:
        with monkeypatch.context() as patch:
            patch.setattr(extractor.shards.sequence.ShardSequence, "finish", killed)
            with pytest.raises(KeyError):
                await run(options_for(server, path, tmp_path / "out"), notes)
        assert stored_ordinals(tmp_path / "out") == set(range(8))
        assert read_samples(tmp_path / "out") == {}
        options = options_for(server, path, tmp_path / "out")
        await run(options, notes)
        assert len(ordinals_sent(server.requests)) == 8
    assert_whole(tmp_path / "out", prompts)


async def test_sealing_the_last_shard_needs_no_server(
    tmp_path: Path, dump_root: Path, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = make_prompts(8)
    path = write_prompts(tmp_path / "p.jsonl", prompts)

    async def killed(self: object) -> None:
        raise KeyError("stands in for a kill")

    async with FakeServer(dump_root).running() as server:
        with monkeypatch.context() as patch:
            patch.setattr(extractor.shards.sequence.ShardSequence, "finish", killed)
            with pytest.raises(KeyError):
                await run(options_for(server, path, tmp_path / "out"), notes)
        options = options_for(server, path, tmp_path / "out")
    await run(options, notes)
    assert_whole(tmp_path / "out", prompts)


@pytest.mark.parametrize("damage", ["delete", "truncate"])
async def test_samples_whose_bytes_are_gone_are_extracted_again(
    tmp_path: Path, dump_root: Path, notes: Notes, damage: str
) -> None:
    prompts = make_prompts(30, shortest=20)
    path = write_prompts(tmp_path / "p.jsonl", prompts)
    async with FakeServer(dump_root).running() as server:
        options = options_for(server, path, tmp_path / "out", shard_bytes=40_000)
        await run(options, notes)
        shard = sorted((tmp_path / "out" / "shards").iterdir())[1]
        if damage == "delete":
            shard.unlink()
        else:
            os.truncate(shard, shard.stat().st_size - 3000)
        await run(options, notes)
        assert 30 < len(ordinals_sent(server.requests)) < 60
    assert any("are gone; they are extracted again" in message for message in notes.messages)
    assert_whole(tmp_path / "out", prompts)


async def test_dumps_that_a_dead_session_left_are_removed_by_the_next(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    prompts = make_prompts(4)
    path = write_prompts(tmp_path / "p.jsonl", prompts)
    async with FakeServer(dump_root).running() as server:
        options = options_for(server, path, tmp_path / "out")
        await run(options, notes)
        rid = server.requests[-1]
        server.dump(rid, np.arange(5, dtype=np.int32))
        assert dumps_under(dump_root) != []
        await run(options, notes)
    assert dumps_under(dump_root) == []


async def test_failed_rows_are_tried_again_when_asked_for_and_only_then(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    prompts = make_prompts(10)
    path = write_prompts(tmp_path / "p.jsonl", prompts)
    path.write_text(path.read_text() + "{broken\n")
    async with FakeServer(dump_root, faults=faults_once({4: Fault.REJECT})).running() as server:
        options = options_for(server, path, tmp_path / "out", concurrency=1)
        summary = await run(options, notes)
        assert states_of(summary) == {State.STORED: 9, State.FAILED: 2}
        sent = len(server.requests)
        assert states_of(await run(options, notes)) == {State.STORED: 9, State.FAILED: 2}
        assert len(server.requests) == sent
        summary = await run(replace(options, retry_failed=True), notes)
    assert states_of(summary) == {State.STORED: 10, State.FAILED: 1}
    assert summary.totals.by_reason == {Reason.BAD_JSON: 1}
    assert_whole(tmp_path / "out", prompts)


async def test_a_refused_retry_leaves_the_data_set_as_it_was(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    path = write_prompts(tmp_path / "p.jsonl", make_prompts(5))
    other = write_prompts(tmp_path / "q.jsonl", make_prompts(6))
    async with FakeServer(dump_root, faults=faults_once({2: Fault.REJECT})).running() as server:
        options = options_for(server, path, tmp_path / "out")
        await run(options, notes)
        before = rows_of(tmp_path / "out")
        with pytest.raises(ConfigMismatch):
            await run(changed(options, prompts=(other,), retry_failed=True), notes)
        with pytest.raises(ConfigMismatch):
            await run(changed(options, layers="1,2", retry_failed=True), notes)
    with pytest.raises(ServerUnreachable):
        await run(replace(options, retry_failed=True), notes)
    assert rows_of(tmp_path / "out") == before
    assert [row.state for row in before].count(State.FAILED) == 1


def declare_dead(server: FakeServer) -> None:
    """As if its process had ended: another one has its pid now."""
    path = server.directory / "READY.json"
    path.write_text(re.sub(r'"pid_start_ticks": \d+', '"pid_start_ticks": 1', path.read_text()))


@pytest.mark.parametrize(
    ("what", "is_dead"),
    [
        *itertools.product(["whole", "in pieces", "wrong tokens", "short"], [False, True]),
        ("other layout", True),  # a live one is refused before
    ],
)
async def test_dumps_of_an_earlier_session_are_adopted_where_they_are_whole_and_wanted(
    tmp_path: Path, dump_root: Path, notes: Notes, what: str, is_dead: bool
) -> None:
    prompts = make_prompts(6, shortest=20)
    path = write_prompts(tmp_path / "p.jsonl", prompts)

    def row_3_fails(number: int, rid: str) -> Fault | None:
        return Fault.ERROR if ordinals_sent([rid]) == [3] else None

    chunk_tokens = 7 if what == "in pieces" else 0
    first = FakeServer(dump_root, faults=row_3_fails, chunk_tokens=chunk_tokens)
    async with first.running() as server:
        options = options_for(server, path, tmp_path / "out", max_attempts=1)
        await run(options, notes)
        (rid,) = (rid for rid in server.requests if ordinals_sent([rid]) == [3])
    ids = np.array(prompts[3].ids, dtype=np.int32)
    fault = {"wrong tokens": Fault.WRONG_IDS, "short": Fault.SHORT_DUMP}.get(what)
    model = FakeModel(layout=replace(LAYOUT, dtype="F16")) if what == "other layout" else None
    earlier = FakeServer(
        dump_root,
        model=model,
        chunk_tokens=chunk_tokens,
        boot_id=server.boot_id,  # recorded, like the boot of every server that a run used
    )
    async with FakeServer(dump_root).running() as server:
        if is_dead:
            async with earlier.running():
                earlier.dump(rid, ids, fault)
            declare_dead(earlier)
        else:
            earlier.rank_dir, earlier.boot_id = server.rank_dir, server.boot_id
            earlier._counter = itertools.count(900)
            earlier.dump(rid, ids, fault)
        options = options_for(server, path, tmp_path / "out", retry_failed=True)
        summary = await run(options, notes)
        is_adopted = what in ("whole", "in pieces")
        assert ordinals_sent(server.requests) == ([] if is_adopted else [3])
    assert states_of(summary) == {State.STORED: 6}
    assert_whole(tmp_path / "out", prompts)
    assert dumps_under(dump_root) == []


async def test_dumps_of_a_row_that_is_stored_are_not_wanted(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    prompts = make_prompts(6, shortest=20)
    path = write_prompts(tmp_path / "p.jsonl", prompts)
    async with FakeServer(dump_root, faults=faults_once({4: Fault.REJECT})).running() as server:
        await run(options_for(server, path, tmp_path / "out", concurrency=1), notes)
        (rid,) = (rid for rid in server.requests if ordinals_sent([rid]) == [1])
        server.dump(rid, np.array(prompts[1].ids, dtype=np.int32))
        before = read_samples(tmp_path / "out")[1].digest
        await run(options_for(server, path, tmp_path / "out", retry_failed=True), notes)
    assert read_samples(tmp_path / "out")[1].digest == before
    assert_whole(tmp_path / "out", prompts)
    assert dumps_under(dump_root) == []


async def test_what_a_dead_server_left_of_this_run_is_removed(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    path = write_prompts(tmp_path / "p.jsonl", make_prompts(3))
    async with FakeServer(dump_root).running() as server:
        options = options_for(server, path, tmp_path / "out")
        await run(options, notes)
        rid = server.requests[-1]
        dead = FakeServer(dump_root)
        async with dead.running():
            dead.dump(rid, np.arange(4, dtype=np.int32))
            dead.dump("xtr-ffffffff-1-1-1", np.arange(4, dtype=np.int32))
        declare_dead(dead)
        await run(options, notes)
    assert len(dumps_under(dead.directory)) == 1  # another run's is not ours to remove


async def test_an_open_shard_that_the_manifest_never_learnt_of_is_removed(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    prompts = make_prompts(5)
    path = write_prompts(tmp_path / "p.jsonl", prompts)
    async with FakeServer(dump_root).running() as server:
        options = options_for(server, path, tmp_path / "out")
        await run(options, notes)
        orphan = tmp_path / "out" / "shards" / ".shard-000007.open"
        orphan.write_bytes(b"half")
        await run(options, notes)
    assert not orphan.exists()
    assert_whole(tmp_path / "out", prompts)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"model": "another/model"}, r"--model another/model: it serves fake/model"),
        ({"layers": "1,3"}, r"--layers 1,3: it captures boundaries \[1, 2, 3\]"),
        ({"last_kind": "both"}, r"--last both: it keeps post"),
    ],
    ids=["model", "layers", "last"],
)
async def test_a_server_that_captures_something_else_than_asked_is_refused(
    tmp_path: Path, dump_root: Path, notes: Notes, asked: dict[str, str], told: str
) -> None:
    path = write_prompts(tmp_path / "p.jsonl", make_prompts(1))
    async with FakeServer(dump_root).running() as server:
        options = options_for(server, path, tmp_path / "out")
        with pytest.raises(ConfigMismatch, match=told):
            await run(changed(options, **asked), notes)
        assert server.requests == []
        same = changed(options, model="fake/model", layers="1,2,3", last_kind="post")
        assert states_of(await run(same, notes)) == {State.STORED: 1}


# --- the surroundings fail --------------------------------------------------------------------


async def test_a_server_that_stops_answering_ends_the_run_and_rows_stay_resumable(
    tmp_path: Path, dump_root: Path, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    timings = quick(health={"gone_after_s": 0.1})
    prompts = make_prompts(40)
    path = write_prompts(tmp_path / "p.jsonl", prompts)
    reached = asyncio.Event()

    def at_20(number: int, rid: str) -> Fault | None:
        if number == 20:
            reached.set()
        return None

    async with FakeServer(dump_root, faults=at_20, delay_s=0.01).running() as server:
        options = options_for(server, path, tmp_path / "out", max_attempts=1)
        task = asyncio.create_task(run(options, notes, timings=timings))
        await reached.wait()
    error = await raises_known(task)
    assert isinstance(error, ServerLost)
    assert exit_code(error) == 3
    assert "run the same command again" in str(error)
    rows = rows_of(tmp_path / "out")
    assert State.FAILED not in {row.state for row in rows}
    kept = stored_ordinals(tmp_path / "out")
    async with FakeServer(dump_root).running() as server:
        await run(options_for(server, path, tmp_path / "out"), notes, timings=timings)
    assert sorted(ordinals_sent(server.requests)) == sorted(set(range(40)) - kept)
    assert_whole(tmp_path / "out", prompts)


async def test_a_run_without_a_server_says_how_to_start_one(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    server = FakeServer(dump_root)
    server.url = "http://127.0.0.1:9"
    path = write_prompts(tmp_path / "p.jsonl", make_prompts(1))
    with pytest.raises(ServerUnreachable, match=r"extractor serve"):
        await run(options_for(server, path, tmp_path / "out"), notes)


async def test_a_server_without_the_plugin_is_told_apart(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    async with FakeServer(dump_root).running() as server:
        path = write_prompts(tmp_path / "p.jsonl", make_prompts(1))
        options = options_for(server, path, tmp_path / "out", dump_root=tmp_path / "elsewhere")
        with pytest.raises(BadDumpDir, match=r"--dump-dir .*elsewhere does not exist"):
            await run(options, notes)
        assert server.requests == []


async def test_a_probe_without_a_dump_stops_the_run_before_the_first_prompt(
    tmp_path: Path, dump_root: Path, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    timings = quick(probe={"timeout_s": 0.2})
    async with FakeServer(dump_root, faults=faults_once({0: Fault.NO_DUMP})).running() as server:
        path = write_prompts(tmp_path / "p.jsonl", make_prompts(1))
        with pytest.raises(PluginError, match="no dump of it arrived"):
            await run(options_for(server, path, tmp_path / "out"), notes, timings=timings)
        assert ordinals_sent(server.requests) == []


async def test_a_server_without_the_plugin_beside_one_with_it_is_found_out(
    tmp_path: Path, dump_root: Path, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only live server with that model is taken for it, as behind a port mapping."""
    timings = quick(probe={"timeout_s": 0.2})
    elsewhere = FakeServer(tmp_path / "elsewhere")  # as if it had none
    async with FakeServer(dump_root).running() as other, elsewhere.running() as server:
        path = write_prompts(tmp_path / "p.jsonl", make_prompts(1))
        options = options_for(server, path, tmp_path / "out", dump_root=dump_root)
        port = other.url.rpartition(":")[2]
        with pytest.raises(BadDumpDir, match=f"is of a server on port {port}: .* has no plugin"):
            await run(options, notes, timings=timings)
        assert ordinals_sent(server.requests) == []


@pytest.mark.parametrize(
    ("name", "why"),
    [("file", "is a file"), ("file/out", "Not a directory")],
)
async def test_an_out_that_cannot_be_made_is_a_wrong_path_and_no_failing_disk(
    tmp_path: Path, dump_root: Path, notes: Notes, name: str, why: str
) -> None:
    (tmp_path / "file").touch()
    path = write_prompts(tmp_path / "p.jsonl", make_prompts(1))
    async with FakeServer(dump_root).running() as server:
        with pytest.raises(UsageError, match=f"{why}.*name a"):
            await run(options_for(server, path, tmp_path / name), notes)


@pytest.mark.parametrize(
    "fault",
    [Fault.WRONG_IDS, Fault.WRONG_BOUNDARIES, Fault.ERROR_RECORD, Fault.CACHED, Fault.TRUNCATED],
)
async def test_a_bad_probe_dump_stops_the_run_before_the_first_prompt(
    tmp_path: Path, dump_root: Path, notes: Notes, fault: Fault
) -> None:
    async with FakeServer(dump_root, faults=faults_once({0: fault})).running() as server:
        path = write_prompts(tmp_path / "p.jsonl", make_prompts(1))
        with pytest.raises(PluginError, match="probe prompt"):
            await run(options_for(server, path, tmp_path / "out"), notes)
        assert ordinals_sent(server.requests) == []
    assert dumps_under(dump_root) == []


async def test_a_removed_dump_directory_ends_the_run(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    prompts = make_prompts(30)
    path = write_prompts(tmp_path / "p.jsonl", prompts)

    def at_10(number: int, rid: str) -> Fault | None:
        if number == 10:
            shutil.rmtree(server.directory)
        return Fault.NO_DUMP if number >= 10 else None

    async with FakeServer(dump_root, faults=at_10).running() as server:
        task = asyncio.create_task(run(options_for(server, path, tmp_path / "out"), notes))
        error = await raises_known(task)
    assert isinstance(error, PluginError)
    assert "is gone" in str(error)
    async with FakeServer(dump_root).running() as server:
        await run(options_for(server, path, tmp_path / "out"), notes)
    assert_whole(tmp_path / "out", prompts)


async def test_a_full_output_disk_stops_with_exit_4_and_loses_nothing(
    tmp_path: Path, dump_root: Path, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = make_prompts(60, shortest=20)
    path = write_prompts(tmp_path / "p.jsonl", prompts)
    # Some are stored before it is full.
    timings = Timings(store=StoreTimings(group_samples=8))
    room = 150_000
    real = os.pwrite

    def full(descriptor: int, data: bytes, offset: int, /) -> int:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if "/shards/" in name and offset + len(data) > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        return real(descriptor, data, offset)

    async with FakeServer(dump_root).running() as server:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            options = options_for(server, path, tmp_path / "out")
            task = asyncio.create_task(run(options, notes, timings=timings))
            error = await raises_known(task)
        assert isinstance(error, SpaceError)
        assert exit_code(error) == 4
        assert dumps_under(dump_root) == []
        kept = stored_ordinals(tmp_path / "out")
        assert 0 < len(kept) < 60
        before = len(server.requests)
        await run(options_for(server, path, tmp_path / "out"), notes)
        again = ordinals_sent(server.requests[before:])
    assert sorted(again) == sorted(set(range(60)) - kept)
    assert_whole(tmp_path / "out", prompts)


async def test_an_output_disk_without_room_is_refused_before_the_first_prompt(
    tmp_path: Path, dump_root: Path, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeServer(dump_root).running() as server:
        path = write_prompts(tmp_path / "p.jsonl", make_prompts(1))
        options = options_for(server, path, tmp_path / "out")
        monkeypatch.setattr(extractor.shards.output_dir, "free_bytes", lambda path: 1 << 20)
        with pytest.raises(
            SpaceError, match=r"only 1\.0 MiB free, a run begins with 64\.0 MiB at least"
        ):
            await run(options, notes)
        assert server.requests == []


async def test_a_disk_that_takes_no_byte_is_full_not_forbidden(
    tmp_path: Path, dump_root: Path, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with FakeServer(dump_root).running() as server:
        path = write_prompts(tmp_path / "p.jsonl", make_prompts(1))
        options = options_for(server, path, tmp_path / "out")
        monkeypatch.setattr(output_dir, "os", SimpleNamespace(write=full, path=os.path))
        with pytest.raises(SpaceError):
            await run(options, notes)


async def test_a_dry_run_of_what_was_begun_says_what_is_settled_already(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    async with FakeServer(dump_root).running() as server:
        path = write_prompts(tmp_path / "p.jsonl", make_prompts(3))
        options = options_for(server, path, tmp_path / "out")
        await dry_run(options, notes)
        assert "settled already" not in str(notes.messages)
        await run(options, notes)
        await dry_run(options, notes)
        assert f"{tmp_path / 'out'} has 3 rows settled already" in str(notes.messages)


async def test_dry_runs_of_one_server_at_the_same_time_do_not_disturb_each_other(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    """A server rejects the rid of a request in progress."""
    async with FakeServer(dump_root, delay_s=0.02).running() as server:
        path = write_prompts(tmp_path / "p.jsonl", make_prompts(10))
        options = options_for(server, path, tmp_path / "out")
        await asyncio.gather(dry_run(options, notes), dry_run(options, notes))
    assert len(server.requests) == len(set(server.requests)) == 2 * (1 + 10)

"""What passes between us and one start of a server."""

from __future__ import annotations

import asyncio
from pathlib import Path

from helpers import Notes, make_prompts, options_for, prompt_of, write_prompts

from extractor.core.counters import Counters
from extractor.core.failure import Failure
from extractor.core.timings import Timings
from extractor.dispatch.connection import Connection, ConnectionSettings
from extractor.dispatch.health import Health
from extractor.dispatch.limiter import Limiter
from extractor.dispatch.monitor import Monitor
from extractor.dispatch.scheduler import Lane, Scheduler
from extractor.dumps.collector import Collector
from extractor.servers.client import Client
from extractor.servers.target import require_target
from extractor.testing.fake_server import FakeServer
from extractor.testing.faults import Fault


async def test_what_is_answered_and_dumped_when_a_server_is_lost_is_not_sent_again(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    (row,) = make_prompts(1, shortest=5)
    prompt = prompt_of(row)
    path = write_prompts(tmp_path / "p.jsonl", [row])
    server = FakeServer(dump_root, faults=lambda number, rid: Fault.NO_DUMP)
    async with (
        server.running(),
        Client(server.url, concurrency=1, request_timeout_s=30.0) as client,
    ):
        options = options_for(server, path, tmp_path / "out")
        target = await require_target(client, options)
        scheduler, lane = Scheduler(), Lane(health=Health(Limiter(1)))
        collector = Collector(target.ranks, rid_prefix="xtr-run-")
        monitor = Monitor(
            client=client,
            target=target,
            health=lane.health,
            collector=collector,
            run_id="run",
            timings=Timings(),
            report=notes.report,
            wake=scheduler.wake,
        )
        settings = ConnectionSettings(
            run_id="run",
            session_id="1",
            counters=Counters(),
            dump_timeout_s=60.0,
            death_shows_s=2.0,
        )
        connection = Connection(
            settings, client=client, target=target, collector=collector, lane=lane, monitor=monitor
        )
        scheduler.add(lane)
        slot = await scheduler.take(prompt.ordinal, prompt.num_tokens)
        assert slot is not None
        fetched = asyncio.create_task(connection.fetch(prompt, 1, slot))
        while not lane.health.num_served:  # noqa: ASYNC110 - the answer is here
            await asyncio.sleep(0.01)
        server.dump(server.requests[0], prompt.input_ids)
        assert connection.end() == []
        pieces = await fetched
        assert not isinstance(pieces, Failure)
        assert [piece.rows for piece in pieces] == [prompt.num_tokens]
        assert pieces[0].handle.path.exists()

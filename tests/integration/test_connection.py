"""What passes between us and one start of a server."""

from __future__ import annotations

import asyncio
from pathlib import Path

from helpers import LAYOUT, Notes, make_prompts, options_for, prompt_of, write_prompts

from extractor.core.counters import Counters
from extractor.core.failure import Failure
from extractor.dispatch.connection import Exchange
from extractor.dispatch.limiter import Fixed
from extractor.dispatch.scheduler import Turns
from extractor.servers.client import Client
from extractor.servers.target import require_target
from extractor.testing.fake_server import FakeServer
from extractor.testing.faults import Fault
from manifest.records import Planned, Source
from manifest.writer_thread import StoreOwner


async def test_what_is_answered_and_dumped_when_a_server_is_lost_is_not_asked_for_again(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    (row,) = make_prompts(1, shortest=5)
    prompt = prompt_of(row)
    path = write_prompts(tmp_path / "p.jsonl", [row])
    owner = await StoreOwner.open(tmp_path / "manifest.sqlite")
    source = Source(number=0, path="p", size_bytes=1, digest="d", num_rows=1)
    await owner.call(lambda store: store.begin({}, [source]))
    owner.post(
        Planned(
            ordinal=0, source=0, line=1, label=None, key=prompt.key,
            num_tokens=prompt.num_tokens, num_trained=0,
        )
    )  # fmt: skip
    server = FakeServer(dump_root, faults=lambda number, rid: Fault.NO_DUMP)
    async with (
        server.running(),
        Client(server.url, concurrency=1, request_timeout_s=30.0) as client,
    ):
        options = options_for(server, path, tmp_path / "out")
        turns = Turns()
        exchange = Exchange(
            options=options,
            client=client,
            target=await require_target(client, options),
            collector=None,
            owner=owner,
            counters=Counters(),
            run_id="run",
            layout=LAYOUT,
            limiter=Fixed(1),
            turns=turns,
            report=notes.report,
        )
        turns.add(exchange.watch.gate)
        turn = await turns.take(prompt.num_tokens)
        assert turn is not None
        fetched = asyncio.create_task(exchange.fetch(prompt, 1, turn))
        while not exchange.watch.num_served:  # noqa: ASYNC110 - the answer is here
            await asyncio.sleep(0.01)
        server.dump(server.requests[0], prompt.input_ids)
        assert exchange.end() == []
        pieces = await fetched
        assert not isinstance(pieces, Failure)
        assert [piece.rows for piece in pieces] == [prompt.num_tokens]
        assert pieces[0].handle.path.exists()
    await owner.close()

"""What passes between us and one start of a server."""

from __future__ import annotations

import asyncio
from pathlib import Path

from helpers import LAYOUT, Notes, make_prompts, options_for, prompt_of, write_prompts

from extractor.client import Client
from extractor.concurrency import Fixed
from extractor.exchange import Exchange
from extractor.measurements import Counters
from extractor.retry import Failure
from extractor.targets import require_target
from extractor.testing import FakeServer, Fault
from extractor.turns import Turns


async def test_what_is_answered_and_dumped_when_a_server_is_lost_is_not_asked_for_again(
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
        turns = Turns()
        exchange = Exchange(
            options=options,
            client=client,
            target=await require_target(client, options),
            collector=None,
            counters=Counters(),
            run_id="run",
            layout=LAYOUT,
            limiter=Fixed(1),
            turns=turns,
            say=notes.note,
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

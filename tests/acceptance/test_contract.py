"""What the client relies on in a server. The fake one must behave as the real one does."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from helpers import Ids, dumps_under, make_prompts, prompt_of, write_prompts

from acceptance.tool import Server, Tool
from extractor.core.checks import ReplyFacts, check_header, check_ids
from extractor.core.failure import Failure, FailureKind
from extractor.core.locations import DumpRoot
from extractor.core.request import Limits, Request, dump_bytes
from extractor.core.rids import rid_prefix
from extractor.dumps.collector import Collector
from extractor.dumps.discovery import require_dump_directory
from extractor.dumps.dump_reader import DumpPiece
from extractor.servers.client import Client, ServerFacts
from extractor.servers.probe import require_probe
from extractor.servers.target import Target, limits_of, require_plugin
from manifest.states import Reason
from server_patch.dump_format import Ready

pytestmark = pytest.mark.timeout(120)
PATIENCE_S = 30.0


@dataclass
class Talk:
    """A client that talks to one server, and its collector."""

    client: Client
    facts: ServerFacts
    ready: Ready
    limits: Limits
    target: Target
    collector: Collector
    run_id: str

    def request(self, ids: list[int], *, rid: str | None = None) -> Request:
        row = Ids(ids=tuple(ids), mask=(0,) * len(ids))
        return Request(
            rid=rid or f"{rid_prefix(self.run_id)}{secrets.token_hex(4)}", prompt=prompt_of(row)
        )

    async def sample(self, ids: list[int]) -> tuple[ReplyFacts, list[DumpPiece]]:
        """Send one prompt; its answer and its pieces."""
        request = self.request(ids)
        collected = self.collector.expect(request.rid, num_tokens=len(ids))
        reply = await self.client.generate(request)
        assert isinstance(reply, ReplyFacts), reply
        async with asyncio.timeout(PATIENCE_S):
            outcome = await collected
        assert not isinstance(outcome, Failure), outcome
        return reply, list(outcome)


@pytest.fixture
async def talk(server: Server) -> AsyncIterator[Talk]:
    async with talking(server) as found:
        yield found
    assert dumps_under(server.root) == []


@asynccontextmanager
async def talking(server: Server) -> AsyncIterator[Talk]:
    run_id = secrets.token_hex(4)
    async with Client(server.url, concurrency=32, request_timeout_s=PATIENCE_S) as client:
        facts = await client.facts()
        ranks = require_plugin(DumpRoot(path=server.root), url=server.url, facts=facts)
        limits = limits_of(facts, ranks[0].ready)
        collector = Collector(ranks, rid_prefix=rid_prefix(run_id))
        watching = asyncio.create_task(collector.run())
        try:
            yield Talk(
                client=client,
                facts=facts,
                ready=ranks[0].ready,
                limits=limits,
                target=Target(url=server.url, facts=facts, ranks=ranks, limits=limits),
                collector=collector,
                run_id=run_id,
            )
        finally:
            watching.cancel()
            collector.sweep()


def ids_of(length: int, seed: int = 1) -> list[int]:
    return [int(n) for n in np.random.default_rng(seed).integers(3, 500, length)]


async def test_a_server_and_its_plugin_say_the_same_of_the_model(talk: Talk) -> None:
    assert talk.ready.model.path == talk.facts.model_path
    assert talk.ready.rank == 0
    assert talk.facts.context_length is not None
    assert talk.limits.max_prompt_tokens < talk.facts.context_length
    assert talk.facts.max_requests is not None and talk.facts.max_requests > 1
    assert await talk.client.is_answering()
    assert await talk.client.is_healthy()
    require_dump_directory(talk.target.ranks)


async def test_the_probe_arrives_and_leaves_nothing(talk: Talk, server: Server) -> None:
    await require_probe(talk.client, talk.target, run_id=secrets.token_hex(4))
    assert dumps_under(server.root) == []


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 200])
async def test_every_row_of_a_prompt_arrives_with_its_token(talk: Talk, length: int) -> None:
    ids = ids_of(length)
    reply, pieces = await talk.sample(ids)
    assert reply == ReplyFacts(prompt_tokens=length, cached_tokens=0, weight_version="default")
    assert talk.facts.weight_version == reply.weight_version
    assert sum(piece.rows for piece in pieces) == length
    for piece in pieces:
        dump = piece.handle.dump
        assert check_header(dump.header, talk.ready) is None
        assert dump.size_bytes == piece.handle.path.stat().st_size
        span = dump.tensors["input_ids"]
        found = np.frombuffer(piece.handle.path.read_bytes()[span.begin : span.end], dtype="<i4")
        assert check_ids(np.array(ids, dtype=np.int32), found, start=piece.start) is None
    used = sum(piece.handle.dump.size_bytes for piece in pieces)
    assert used <= dump_bytes(length, talk.ready.layout, talk.limits)


async def test_the_same_prompt_again_is_computed_again(talk: Talk) -> None:
    """A row that came from the prefix cache would have no state."""
    ids = ids_of(100)
    for _ in range(3):
        reply, pieces = await talk.sample(ids)
        assert reply.cached_tokens == 0
        assert sum(piece.rows for piece in pieces) == 100


async def test_the_longest_prompt_is_taken_whole_and_one_more_token_is_refused(talk: Talk) -> None:
    longest = talk.limits.max_prompt_tokens
    reply, pieces = await talk.sample(ids_of(longest))
    assert reply.prompt_tokens == sum(piece.rows for piece in pieces) == longest
    refused = await talk.client.generate(talk.request(ids_of(longest + 10)))
    assert isinstance(refused, Failure)
    assert (refused.reason, refused.kind) == (Reason.REJECTED, FailureKind.PERMANENT)


async def test_a_duplicate_request_is_reported_and_the_first_copy_is_dumped(
    talk: Talk,
) -> None:
    """A gateway may send a POST twice."""
    ids = ids_of(talk.limits.max_prompt_tokens)
    request = talk.request(ids)
    collected = talk.collector.expect(request.rid, num_tokens=len(ids))
    replies = await asyncio.gather(*(talk.client.generate(request) for _ in range(6)))
    refused = [reply for reply in replies if isinstance(reply, Failure)]
    assert refused, replies
    assert all(reply.kind is FailureKind.COPY for reply in refused)
    assert all("Duplicate request ID" in reply.detail for reply in refused)
    expected = ReplyFacts(prompt_tokens=len(ids), cached_tokens=0, weight_version="default")
    assert expected in replies
    async with asyncio.timeout(PATIENCE_S):
        pieces = await collected
    assert not isinstance(pieces, Failure)
    assert sum(piece.rows for piece in pieces) == len(ids)


async def test_requests_of_others_are_not_dumped(talk: Talk, server: Server) -> None:
    reply = await talk.client.generate(talk.request(ids_of(20), rid=f"other-{talk.run_id}"))
    assert isinstance(reply, ReplyFacts)
    await talk.sample(ids_of(5))  # whatever was to be written before it has been
    assert not [name for name in dumps_under(server.root) if "error" in name]
    talk.collector.sweep()
    assert dumps_under(server.root) == []


async def test_an_abort_of_an_unknown_request_harms_nobody(talk: Talk) -> None:
    await talk.client.abort(f"{rid_prefix(talk.run_id)}nobody")
    await talk.sample(ids_of(5))


async def test_many_at_once_keep_their_rows_apart(talk: Talk) -> None:
    lengths = [3, 90, 33, 64, 5, 128, 17, 40, 2, 77, 31, 50]
    prompts = [ids_of(length, seed=length) for length in lengths]
    results = await asyncio.gather(*(talk.sample(ids) for ids in prompts))
    for ids, (_, pieces) in zip(prompts, results, strict=True):
        found = [
            token
            for piece in pieces
            for token in np.frombuffer(
                piece.handle.path.read_bytes()[
                    piece.handle.dump.tensors["input_ids"].begin : piece.handle.dump.tensors[
                        "input_ids"
                    ].end
                ],
                dtype="<i4",
            ).tolist()
        ]
        assert found == ids


@pytest.mark.parametrize(
    "server",
    ["fake", pytest.param("real", marks=[pytest.mark.sglang, pytest.mark.smoke])],
    indirect=True,
)
def test_a_run_over_mixed_lengths_verifies_clean(
    tmp_path: Path, tool: Tool, server: Server
) -> None:
    prompts = make_prompts(40, longest=150, vocabulary=500)
    path = write_prompts(tmp_path / "p.jsonl", prompts)
    out = tmp_path / "out"
    ran = tool.run(path, out, server, "--json")
    assert ran.returncode == 0, ran.stderr
    assert ran.json()["rows"]["stored"] == 40
    verified = tool("verify", out, "--json")
    assert verified.returncode == 0, verified.stdout
    assert verified.json()["samples_checked"] == 40
    assert dumps_under(server.root) == []


def test_doctor_finds_nothing_wrong(tmp_path: Path, tool: Tool, server: Server) -> None:
    result = tool("doctor", "--server", server.url, "--dump-dir", server.root, "--out", "out")
    assert result.returncode == 0, result.stdout
    assert "PROBLEM" not in result.stdout
    assert "OK       probe: " in result.stdout

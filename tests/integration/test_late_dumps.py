"""No dump is left behind that comes late: of something that was given up before."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from helpers import Notes, dumps_under, make_prompts, options_for, quick, run, write_prompts

from extractor.core.locations import DumpRoot
from extractor.core.rids import PROBE_SESSION
from extractor.servers.client import Client
from extractor.servers.probe import require_probe
from extractor.servers.target import Target, require_plugin
from extractor.testing.fake_server import FakeServer
from extractor.testing.faults import Fault, FaultPlan, no_faults
from manifest.states import Reason


class LateServer(FakeServer):
    """Answers at once, but keeps some dumps back: one whose writers are behind."""

    def __init__(
        self, root: Path, *, is_late: Callable[[str], bool], faults: FaultPlan = no_faults
    ) -> None:
        super().__init__(root, faults=faults)
        self._is_late = is_late
        self.held: list[Callable[[], None]] = []
        self.has_held = asyncio.Event()

    def dump(self, rid: str, ids: npt.NDArray[np.int32], fault: Fault | None = None) -> None:
        write = super().dump
        if not self._is_late(rid):
            write(rid, ids, fault)
            return
        self.held.append(lambda: write(rid, ids, fault))
        self.has_held.set()

    def release(self) -> None:
        for write in self.held:
            write()
        self.held.clear()


def is_probe(rid: str) -> bool:
    return PROBE_SESSION in rid


async def given_up(task: asyncio.Task[Any], server: LateServer) -> None:
    """Cancel `task` once something is kept back."""
    await server.has_held.wait()
    task.cancel()
    await let_it_write(task, server)


async def let_it_write(task: asyncio.Task[Any], server: LateServer) -> None:
    """Let the server write what it kept back, while `task` ends."""
    asyncio.get_running_loop().call_later(0.2, server.release)
    await asyncio.wait([task])
    assert server.held == []
    assert dumps_under(server.directory.parents[1]) == []


async def test_of_a_probe_that_is_broken_off(dump_root: Path) -> None:
    server = LateServer(dump_root, is_late=is_probe)
    async with (
        server.running(),
        Client(server.url, concurrency=1, request_timeout_s=60.0) as client,
    ):
        facts = await client.facts()
        ranks = require_plugin(DumpRoot(path=dump_root), url=server.url, facts=facts)
        target = Target.of(server.url, facts, ranks)
        probe = asyncio.create_task(require_probe(client, target, run_id=secrets.token_hex(4)))
        await given_up(probe, server)
        assert server.aborted == server.requests


async def test_of_a_prompt_that_was_answered(dump_root: Path, tmp_path: Path, notes: Notes) -> None:
    path = write_prompts(tmp_path / "p.jsonl", make_prompts(1))
    server = LateServer(dump_root, is_late=lambda rid: not is_probe(rid))
    async with server.running():
        options = options_for(server, path, tmp_path / "out", dump_timeout_s=0.001, max_attempts=1)
        task = asyncio.create_task(run(options, notes))
        await server.has_held.wait()
        await let_it_write(task, server)
    assert (await task).totals.by_reason == {Reason.DUMP_MISSING: 1}


async def test_of_a_probe_that_asks_whether_the_server_serves_again(
    dump_root: Path, tmp_path: Path, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    timings = quick(health={"refused_open_s": 0.0})
    path = write_prompts(tmp_path / "p.jsonl", make_prompts(1))
    server = LateServer(
        dump_root,
        is_late=lambda rid: is_probe(rid) and rid != server.requests[0],  # that of the start
        faults=lambda number, rid: None if is_probe(rid) else Fault.BUSY,
    )
    async with server.running():
        options = options_for(server, path, tmp_path / "out")
        await given_up(asyncio.create_task(run(options, notes, timings=timings)), server)

"""Several servers in one run: each row ends right, whichever of them come and go."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from acceptance.tool import Fake, fake_server
from aiohttp import web
from helpers import (
    LAYOUT,
    Ids,
    Notes,
    assert_whole,
    dumps_under,
    make_prompts,
    options_for,
    ordinals_sent,
    quick,
    rows_of,
    run,
    stored_rows,
    write_prompts,
)

import extractor.dispatch.monitor
import extractor.pipeline.session
from extractor.core.checks import ReplyFacts
from extractor.core.counters import Counters, ServerNow
from extractor.core.errors import (
    ConfigMismatch,
    PluginError,
    ServerGone,
    ServerLost,
    ServerUnreachable,
    UsageError,
    first_known,
)
from extractor.core.failure import Failure
from extractor.core.locations import MANIFEST_NAME
from extractor.core.request import Limits, Request, dump_bytes
from extractor.core.run_options import RunOptions
from extractor.dispatch.server import connections_each, require_connections
from extractor.dispatch.suspects import Suspects
from extractor.pipeline.summary import RunSummary
from extractor.servers.client import Client
from extractor.servers.launcher import free_port
from extractor.testing.fake_model import FakeModel
from extractor.testing.fake_server import FakeServer
from extractor.testing.faults import Fault, faults_once
from manifest.states import Reason, State
from manifest.store import Store

#: So that a server has not answered everything before it is killed.
SLOWLY = ("--delay-s", "0.02")


#: Reports often enough to see each change.
WATCHED = quick(status={"report_interval_s": 0.01})


@pytest.fixture
def prompts() -> list[Ids]:
    return make_prompts(120, shortest=5)


@pytest.fixture
def path(tmp_path: Path, prompts: list[Ids]) -> Path:
    return write_prompts(tmp_path / "p.jsonl", prompts)


def options_of(
    servers: list[FakeServer | Fake | str], root: Path, path: Path, out: Path, **changes: Any
) -> RunOptions:
    """A run against several servers under one dump root."""
    urls = tuple(server if isinstance(server, str) else server.url for server in servers)
    changes = {"concurrency": 4, "server_urls": urls, **changes}
    return options_for(FakeServer(root), path, out, **changes)


async def ends_with(coroutine: Any) -> BaseException:
    with pytest.raises(BaseException) as caught:
        await coroutine
    return first_known(caught.value)


def prompts_by_start(summary: RunSummary) -> list[list[int]]:
    """Prompts that each start of each server answered."""
    return [[start.served.prompts for start in server.starts] for server in summary.servers]


@asynccontextmanager
async def process(root: Path, *arguments: str) -> AsyncIterator[Fake]:
    """A fake server that can be killed."""
    manager = fake_server(root, *arguments)
    server = await asyncio.to_thread(manager.__enter__)
    try:
        yield server
    finally:
        await asyncio.to_thread(manager.__exit__, None, None, None)


async def killed(servers: list[Fake], *, after: int) -> None:
    """SIGKILL to all of them, as soon as each has got so many requests."""
    for server in servers:
        while await asyncio.to_thread(server.requests) < after:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    for server in servers:
        server.process.kill()
    for server in servers:
        await asyncio.to_thread(server.process.wait)


class Waiting(FakeServer):
    """Holds its answers back from the moment that something else has to happen first."""

    def __init__(self, root: Path, *, after: int, until: Callable[[], bool]) -> None:
        super().__init__(root)
        self._after, self._until = after, until
        self.has_begun_to_wait = asyncio.Event()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if len(self.requests) >= self._after:
            self.has_begun_to_wait.set()
            while not self._until():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return await super()._generate(request)


# --- all are well -----------------------------------------------------------------------------


async def test_prompts_are_spread_and_each_is_sent_once(
    tmp_path: Path, dump_root: Path, notes: Notes, prompts: list[Ids], path: Path
) -> None:
    one, other = FakeServer(dump_root, delay_s=0.005), FakeServer(dump_root, delay_s=0.005)
    async with one.running(), other.running():
        options = options_of([one, other], dump_root, path, tmp_path / "out")
        summary = await run(options, notes)
    sent = ordinals_sent(one.requests), ordinals_sent(other.requests)
    assert sorted(sent[0] + sent[1]) == list(range(120))
    assert min(len(sent[0]), len(sent[1])) > 30
    assert one.peak_concurrency == other.peak_concurrency == 4
    assert prompts_by_start(summary) == [[len(sent[0])], [len(sent[1])]]
    assert_whole(tmp_path / "out", prompts)
    assert dumps_under(dump_root) == []
    (first, second) = summary.to_document(tmp_path)["session"]["servers"]
    assert (first["url"], first["concurrency"], first["concurrency_is"]) == (one.url, 4, "fixed")
    assert first["starts"][0]["boot_id"] == one.boot_id
    assert first["starts"][0]["tokens"] + second["starts"][0]["tokens"] == sum(
        len(row.ids) for row in prompts
    )
    assert f"requests at {one.url}" in summary.to_text(tmp_path)


async def test_the_faster_server_gets_more(
    tmp_path: Path, dump_root: Path, notes: Notes, prompts: list[Ids], path: Path
) -> None:
    fast, slow = FakeServer(dump_root), FakeServer(dump_root, delay_s=0.1)
    async with fast.running(), slow.running():
        options = options_of([slow, fast], dump_root, path, tmp_path / "out", concurrency=2)
        await run(options, notes)
    assert len(fast.requests) > 2 * len(slow.requests)
    assert_whole(tmp_path / "out", prompts)


# --- they do not fit each other ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "model"),
    [
        ("boundaries: (1, 2, 3) and (0, 2, 3)", {"layout": replace(LAYOUT, boundaries=(0, 2, 3))}),
        ("hidden_size: 8 and 10", {"layout": replace(LAYOUT, hidden_size=10)}),
        ("dtype: 'BF16' and 'F16'", {"layout": replace(LAYOUT, dtype="F16")}),
        ("last_kind: 'post' and 'both'", {"layout": replace(LAYOUT, last_kind="both")}),
        ("vocab_size: 1000 and 1001", {"vocab_size": 1001}),
        ("model_path: 'fake/model' and 'fake/tuned'", {"model_path": "fake/tuned"}),
        ("kv_cache_dtype: 'auto' and 'fp8_e5m2'", {"kv_cache_dtype": "fp8_e5m2"}),
        (f"weights: '{0:032x}' and '{1:032x}'", {"checkpoint": 1}),
    ],
    ids=lambda value: value.partition(":")[0] if isinstance(value, str) else "",
)
async def test_servers_that_capture_something_else_are_refused_by_name_and_field(
    tmp_path: Path, dump_root: Path, notes: Notes, path: Path, told: str, model: dict[str, Any]
) -> None:
    one, other = FakeServer(dump_root), FakeServer(dump_root)
    for name, value in model.items():
        setattr(other.model, name, value)
    async with one.running(), other.running():
        options = options_of([one, other], dump_root, path, tmp_path / "out")
        with pytest.raises(ConfigMismatch) as caught:
            await run(options, notes)
    assert f"{one.url} and {other.url} differ:\n  {told}\n" in str(caught.value)
    assert one.requests == other.requests == []


def test_one_address_written_in_two_ways_is_refused(
    tmp_path: Path, dump_root: Path, path: Path
) -> None:
    with pytest.raises(UsageError, match="named twice"):
        options_of(["http://h:1", "http://H:1/"], dump_root, path, tmp_path / "out")


async def test_one_server_under_two_names_behind_another_is_refused(
    tmp_path: Path, dump_root: Path, notes: Notes, path: Path
) -> None:
    async with FakeServer(dump_root).running() as other, FakeServer(dump_root).running() as server:
        alias = server.url.replace("127.0.0.1", "localhost")
        options = options_of([other, server, alias], dump_root, path, tmp_path / "out")
        with pytest.raises(ConfigMismatch, match="are the same server"):
            await run(options, notes)
    assert other.requests == server.requests == []


async def test_a_server_that_dumps_elsewhere_is_not_taken_for_another_of_the_run(
    tmp_path: Path, dump_root: Path, notes: Notes, path: Path
) -> None:
    async with (
        FakeServer(dump_root).running() as one,
        FakeServer(tmp_path / "elsewhere").running() as other,
    ):
        options = options_of([one, other], dump_root, path, tmp_path / "out")
        with pytest.raises(PluginError, match=f"{other.url} has no plugin"):
            await run(options, notes)
    assert one.requests == other.requests == []


async def test_one_server_under_two_names_is_refused(
    tmp_path: Path, dump_root: Path, notes: Notes, path: Path
) -> None:
    async with FakeServer(dump_root).running() as server:
        alias = server.url.replace("127.0.0.1", "localhost")
        options = options_of([server, alias], dump_root, path, tmp_path / "out")
        with pytest.raises(ConfigMismatch, match="are the same server"):
            await run(options, notes)


async def test_the_strictest_limit_holds_for_all(
    tmp_path: Path, dump_root: Path, notes: Notes, path: Path
) -> None:
    one = FakeServer(dump_root, model=FakeModel(context_length=40))
    other = FakeServer(dump_root)
    async with one.running(), other.running():
        options = options_of([one, other], dump_root, path, tmp_path / "out")
        summary = await run(options, notes)
    longest = max(row.prompt.num_tokens for row in stored_rows(tmp_path / "out"))
    assert longest == 33  # the server takes 34 tokens and one that it makes
    assert set(summary.totals.by_reason) == {Reason.TOO_LONG}


# --- they go ----------------------------------------------------------------------------------


async def test_a_server_that_dies_in_mid_run_costs_no_row(
    tmp_path: Path, dump_root: Path, notes: Notes, prompts: list[Ids], path: Path
) -> None:
    async with (
        process(dump_root, "--fault", "die", "--fault-every", "20") as mortal,
        FakeServer(dump_root, delay_s=0.005).running() as other,
    ):
        options = options_of([mortal, other], dump_root, path, tmp_path / "out", max_attempts=1)
        summary = await run(options, notes)
    assert summary.totals.by_state[State.STORED] == 120
    (mortal_starts, other_starts) = prompts_by_start(summary)
    assert mortal_starts[0] > 0 and sum(mortal_starts) + sum(other_starts) == 120
    told = "\n".join(notes.messages)
    assert f"the server at {mortal.url} died" in told
    assert f"The run goes on with {other.url}, and uses {mortal.url} again when" in told
    assert_whole(tmp_path / "out", prompts)
    assert [name for name in dumps_under(dump_root) if other.boot_id in name] == []


async def test_a_server_that_returns_is_proven_and_used_again(
    tmp_path: Path,
    dump_root: Path,
    prompts: list[Ids],
    path: Path,
) -> None:
    seen: list[tuple[ServerNow, ...]] = []

    class Watching(Notes):
        def update(self, counters: Counters) -> None:
            seen.append(counters.now.servers)

    notes = Watching()
    port = free_port()
    again: list[Fake] = []
    async with process(dump_root, "--port", str(port), "--delay-s", "0.005") as first:
        steady = Waiting(
            dump_root, after=25, until=lambda: bool(again) and again[0].requests() > 10
        )
        async with steady.running():
            options = options_of([first, steady], dump_root, path, tmp_path / "out")
            running = asyncio.create_task(run(options, notes, timings=WATCHED))
            await steady.has_begun_to_wait.wait()
            await killed([first], after=10)
            async with process(dump_root, "--port", str(port)) as second:
                again.append(second)
                summary = await running
    starts = prompts_by_start(summary)
    assert len(starts[0]) == 2 and min(starts[0]) > 0
    assert sum(starts[0]) + sum(starts[1]) == 120
    assert any(f"{first.url} passed the probe; resuming" in note for note in notes.messages)
    assert notes.of_servers == [
        ("server_lost", "warning", first.url),
        ("server_back", "info", first.url),
    ]
    assert all([server.url for server in now] == [first.url, steady.url] for now in seen)
    was_up = [now[0].is_up for now in seen]
    assert was_up[0] and was_up[-1] and not all(was_up)
    assert all(now[0].request_limit == (4 if now[0].is_up else 0) for now in seen)
    assert [now.num_prompts for now in seen[-1]] == [sum(starts[0]), sum(starts[1])]
    assert_whole(tmp_path / "out", prompts)
    assert dumps_under(dump_root) == []


@pytest.mark.parametrize(
    ("reason", "model"),
    [
        ("dtype: 'BF16' and 'F16'", FakeModel(layout=replace(LAYOUT, dtype="F16"))),
        (f"weights: '{0:032x}' and '{1:032x}'", FakeModel(checkpoint=1)),
        ("differ:\n  canary: ", FakeModel(checkpoint=1, fingerprint=0)),
    ],
)
async def test_a_server_that_returns_as_another_is_told_of_and_not_used(
    tmp_path: Path,
    dump_root: Path,
    notes: Notes,
    prompts: list[Ids],
    path: Path,
    reason: str,
    model: FakeModel,
) -> None:
    port = free_port()
    other_model = FakeServer(dump_root, model=model)
    steady = Waiting(
        dump_root, after=25, until=lambda: any("is not used" in note for note in notes.messages)
    )
    async with steady.running():
        async with process(dump_root, "--port", str(port)) as first:
            options = options_of([first, steady], dump_root, path, tmp_path / "out")
            running = asyncio.create_task(run(options, notes))
            await steady.has_begun_to_wait.wait()
            await killed([first], after=1)
            while not any("The run goes on with" in note for note in notes.messages):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        async with other_model.running(port=port):
            await running
    (told,) = [note for note in notes.messages if "is not used" in note]
    assert ("server_unfit", "warning", first.url) in notes.of_servers
    assert reason in told
    assert ordinals_sent(other_model.requests) == []
    assert_whole(tmp_path / "out", prompts)


@pytest.mark.parametrize("comes", [True, False])
async def test_a_server_that_was_not_used_is_told_from_one_that_never_answered(
    tmp_path: Path, dump_root: Path, notes: Notes, prompts: list[Ids], path: Path, comes: bool
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    unfit = FakeServer(dump_root, model=FakeModel(layout=replace(LAYOUT, dtype="F16")))
    steady = Waiting(
        dump_root,
        after=20,
        until=lambda: not comes or any("is not used" in note for note in notes.messages),
    )
    async with steady.running(), AsyncExitStack() as stack:
        options = options_of([steady, url], dump_root, path, tmp_path / "out")
        running = asyncio.create_task(run(options, notes))
        await steady.has_begun_to_wait.wait()
        if comes:
            await stack.enter_async_context(unfit.running(port=int(url.rpartition(":")[2])))
        summary = await running
    told = "it was not used" if comes else "it never answered"
    assert summary.servers[1].to_text() == told
    assert told in summary.to_text(tmp_path)
    assert ordinals_sent(unfit.requests) == []
    assert_whole(tmp_path / "out", prompts)


async def test_a_server_that_does_not_answer_at_the_start_is_used_when_it_does(
    tmp_path: Path, dump_root: Path, notes: Notes, prompts: list[Ids], path: Path
) -> None:
    port = free_port()
    late = FakeServer(dump_root)
    steady = Waiting(dump_root, after=20, until=lambda: len(ordinals_sent(late.requests)) > 10)
    async with steady.running():
        url = f"http://127.0.0.1:{port}"
        options = options_of([steady, url], dump_root, path, tmp_path / "out")
        running = asyncio.create_task(run(options, notes))
        await steady.has_begun_to_wait.wait()
        async with late.running(port=port):
            await running
    assert any(
        f"no server answers at {url} (cannot connect (ECONNREFUSED" in note
        for note in notes.messages
    )
    assert notes.of_servers == [
        ("server_lost", "warning", url),
        ("server_back", "info", url),
    ]
    assert_whole(tmp_path / "out", prompts)
    assert dumps_under(dump_root) == []


async def test_a_server_that_serves_nothing_any_more_costs_no_row(
    tmp_path: Path,
    dump_root: Path,
    notes: Notes,
    monkeypatch: pytest.MonkeyPatch,
    prompts: list[Ids],
    path: Path,
) -> None:
    """It answers, but only with refusals; what it still had under way is broken off."""
    timings = quick(health={"refused_open_s": 0.05, "useless_after_s": 0.2})

    def busy(number: int, rid: str) -> Fault | None:
        if number == 11:
            return Fault.SILENT
        return Fault.BUSY if number > 11 else None

    full = FakeServer(dump_root, faults=busy)

    def has_left() -> bool:
        return any("The run goes on with" in note for note in notes.messages)

    steady = Waiting(dump_root, after=30, until=has_left)
    async with full.running(), steady.running():
        options = options_of([full, steady], dump_root, path, tmp_path / "out", max_attempts=1)
        await run(options, notes, timings=timings)
    assert has_left()
    assert_whole(tmp_path / "out", prompts)
    assert dumps_under(dump_root) == []


# --- they are stopped -------------------------------------------------------------------------


class Draining(FakeServer):
    """Told to end at its eleventh request: it says so, and serves on."""

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self.is_draining = self.is_draining or len(self.requests) == 10
        return await super()._generate(request)


#: Asks often whether a server shuts down.
DRAINING = quick(health={"drain_interval_s": 0.01})


def told_to_stop(notes: Notes) -> bool:
    return any("is shutting down" in message for message in notes.messages)


async def test_a_server_that_is_being_stopped_gets_no_more_prompts(
    tmp_path: Path, dump_root: Path, notes: Notes, prompts: list[Ids], path: Path
) -> None:
    """SGLang serves on after SIGTERM for as long as it is sent anything."""
    ending = Draining(dump_root, delay_s=0.02)
    steady = Waiting(dump_root, after=30, until=lambda: told_to_stop(notes))
    async with ending.running(), steady.running():
        options = options_of([ending, steady], dump_root, path, tmp_path / "out")
        await run(options, notes, timings=DRAINING)
    assert notes.of_servers == [("server_stopping", "warning", ending.url)]
    sent = ordinals_sent(ending.requests), ordinals_sent(steady.requests)
    assert sorted(sent[0] + sent[1]) == list(range(120))
    assert len(sent[1]) > 30, "those that the other would have got"
    assert_whole(tmp_path / "out", prompts)
    assert dumps_under(dump_root) == []


async def test_a_server_that_is_not_stopped_after_all_is_used_again(
    tmp_path: Path, dump_root: Path, notes: Notes, prompts: list[Ids], path: Path
) -> None:
    """Or a proxy before it said so."""
    server = Draining(dump_root, delay_s=0.02)

    async def changes_its_mind() -> None:
        while not told_to_stop(notes):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        server.is_draining = False

    async with server.running(), asyncio.TaskGroup() as tasks:
        tasks.create_task(changes_its_mind())
        options = options_of([server], dump_root, path, tmp_path / "out")
        await run(options, notes, timings=DRAINING)
    assert notes.of_servers == [
        ("server_stopping", "warning", server.url),
        ("server_back", "info", server.url),
    ]
    assert_whole(tmp_path / "out", prompts)


async def test_a_server_that_is_being_stopped_and_never_ends_is_given_up(
    tmp_path: Path, dump_root: Path, notes: Notes, monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    timings = quick(health={"drain_interval_s": 0.01, "useless_after_s": 0.1})
    server = Draining(dump_root, delay_s=0.02)
    async with server.running():
        options = options_of([server], dump_root, path, tmp_path / "out")
        error = await ends_with(run(options, notes, timings=timings))
    assert isinstance(error, ServerLost)
    assert "is shutting down, and has not ended" in str(error)


async def test_no_prompt_is_blamed_for_the_end_of_a_server_that_was_stopped(
    tmp_path: Path,
    dump_root: Path,
    notes: Notes,
    monkeypatch: pytest.MonkeyPatch,
    prompts: list[Ids],
    path: Path,
) -> None:
    """Whoever stops it may lose patience, and kill it with prompts unanswered."""
    ending = Draining(dump_root, faults=faults_once({5: Fault.SILENT}))
    steady = Waiting(dump_root, after=30, until=lambda: told_to_stop(notes))
    monkeypatch.setattr(
        extractor.dispatch.monitor,
        "is_alive",
        lambda ready: ready.boot_id != ending.boot_id or not told_to_stop(notes),
    )
    monkeypatch.setattr(Suspects, "judge", lambda self, found: pytest.fail(str(found)))
    async with ending.running(), steady.running():
        options = options_of([ending, steady], dump_root, path, tmp_path / "out")
        await run(options, notes, timings=DRAINING)
    assert any("was stopped: its process" in message for message in notes.messages)
    assert ("server_back", "info", ending.url) not in notes.of_servers, (
        "it serves, but not for long"
    )
    assert_whole(tmp_path / "out", prompts)


# --- they all go ------------------------------------------------------------------------------


async def test_when_the_last_server_dies_the_run_ends_and_the_same_command_goes_on(
    tmp_path: Path, dump_root: Path, notes: Notes, prompts: list[Ids], path: Path
) -> None:
    async with process(dump_root, *SLOWLY) as one, process(dump_root, *SLOWLY) as other:
        options = options_of([one, other], dump_root, path, tmp_path / "out")
        running = asyncio.create_task(run(options, notes))
        await killed([one, other], after=10)
        error = await ends_with(running)
    assert isinstance(error, ServerGone)
    assert "run the same command again" in str(error)
    assert State.FAILED not in {row.state for row in rows_of(tmp_path / "out")}
    with pytest.raises(ServerUnreachable):
        await run(options, notes)
    async with FakeServer(dump_root).running() as server:
        await run(options_of([server], dump_root, path, tmp_path / "out"), notes)
    assert_whole(tmp_path / "out", prompts)


async def test_a_run_that_may_wait_goes_on_with_the_first_that_returns(
    tmp_path: Path,
    dump_root: Path,
    prompts: list[Ids],
    path: Path,
) -> None:
    seen: list[tuple[ServerNow, ...]] = []
    some_are_stored = asyncio.Event()

    class Watching(Notes):
        def update(self, counters: Counters) -> None:
            seen.append(counters.now.servers)
            if counters.rows.stored:
                some_are_stored.set()

    async with process(dump_root, *SLOWLY) as one, process(dump_root, *SLOWLY) as other:
        options = options_of([one, other], dump_root, path, tmp_path / "out", server_wait_s=60.0)
        running = asyncio.create_task(run(options, Watching(), timings=WATCHED))
        await some_are_stored.wait()
        await killed([one, other], after=1)
        back = FakeServer(dump_root)
        async with back.running(port=int(other.url.rpartition(":")[2])):
            summary = await running
    assert 0 < len(ordinals_sent(back.requests)) < len(prompts)
    assert (summary.counters.rows.settled_before, summary.counters.rows.stored) == (0, len(prompts))
    ended = [counters for counters in seen if not any(server.is_up for server in counters)]
    for number, member in enumerate(summary.servers):
        counted = [servers[number].num_prompts for servers in seen]
        assert counted == sorted(counted)  # none was forgotten
        assert member.num_prompts == counted[-1]
    assert ended and sum(server.num_prompts for server in ended[0]) > 0
    assert_whole(tmp_path / "out", prompts)


# --- a prompt that kills ----------------------------------------------------------------------


async def test_a_prompt_that_kills_is_found_with_two_servers_and_the_third_does_the_rest(
    tmp_path: Path, dump_root: Path, notes: Notes, prompts: list[Ids], path: Path
) -> None:
    """The first dies with it and others beside it; the second with it alone."""
    kill = ("--fault", "die", "--fault-row", "17", "--delay-s", "0.005")
    async with (
        process(dump_root, *kill) as one,
        process(dump_root, *kill) as two,
        process(dump_root, *kill) as three,
    ):
        options = options_of([one, two, three], dump_root, path, tmp_path / "out")
        summary = await run(options, notes)
        alive = [server.process.poll() is None for server in (one, two, three)]
    assert summary.totals.by_reason == {Reason.KILLS_SERVER: 1}
    assert sum(alive) == 1
    (row,) = [row for row in rows_of(tmp_path / "out") if row.reason]
    assert (row.ordinal, row.attempts) == (17, 2)
    assert any(":18: kills_server: " in note for note in notes.messages)
    assert_whole(tmp_path / "out", prompts, without=[17])


async def test_a_death_is_durable_before_the_next_server_gets_the_prompt(
    tmp_path: Path, dump_root: Path, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a killed run does not forget it, and risks no further server."""
    path = write_prompts(tmp_path / "one.jsonl", make_prompts(1))
    out, durable = tmp_path / "out", []
    generate = Client.generate

    def deaths() -> dict[int, int]:
        store = Store.open_read_only(out / MANIFEST_NAME)
        try:
            return store.suspects()
        finally:
            store.close()

    async def noted(client: Client, request: Request) -> ReplyFacts | Failure:
        if ordinals_sent([request.rid]):
            durable.append(await asyncio.to_thread(deaths))
        return await generate(client, request)

    monkeypatch.setattr(Client, "generate", noted)
    kill = ("--fault", "die", "--fault-row", "0")
    async with process(dump_root, *kill) as one, process(dump_root, *kill) as two:
        summary = await run(options_of([one, two], dump_root, path, out), notes)
    assert summary.totals.by_reason == {Reason.KILLS_SERVER: 1}
    assert durable == [{}, {0: 1}]


async def test_a_prompt_that_kills_the_last_server_is_set_aside_nevertheless(
    tmp_path: Path, dump_root: Path, notes: Notes, prompts: list[Ids], path: Path
) -> None:
    kill = ("--fault", "die", "--fault-row", "17", "--delay-s", "0.005")
    async with process(dump_root, *kill) as one, process(dump_root, *kill) as two:
        options = options_of([one, two], dump_root, path, tmp_path / "out")
        assert isinstance(await ends_with(run(options, notes)), ServerGone)
    assert any(":18: kills_server: " in note for note in notes.messages)
    async with process(dump_root, *kill) as server:
        options = options_of([server], dump_root, path, tmp_path / "out")
        summary = await run(options, notes)
    assert summary.totals.by_reason == {Reason.KILLS_SERVER: 1}
    assert_whole(tmp_path / "out", prompts, without=[17])


async def test_a_prompt_that_kills_is_not_tried_for_ever_where_a_run_may_wait(
    tmp_path: Path, dump_root: Path, notes: Notes, prompts: list[Ids], path: Path
) -> None:
    """`--retry-failed` is for the rows that failed before the command, not in it."""
    url = f"http://127.0.0.1:{free_port()}"
    kill = ("--fault", "die", "--fault-row", "17", "--port", url.rpartition(":")[2])
    num_deaths = 0

    async def start_again() -> None:
        nonlocal num_deaths
        while num_deaths < 6:
            async with process(dump_root, *kill) as server:
                await asyncio.to_thread(server.process.wait)
                num_deaths += 1

    supervisor = asyncio.create_task(start_again())
    options = options_of([url], dump_root, path, tmp_path / "out", server_wait_s=20.0)
    for retry_failed, most_deaths in ((False, 2), (True, 4)):
        summary = await run(replace(options, retry_failed=retry_failed), notes)
        assert summary.totals.by_reason == {Reason.KILLS_SERVER: 1}
        assert num_deaths == most_deaths
    supervisor.cancel()
    await asyncio.gather(supervisor, return_exceptions=True)
    assert_whole(tmp_path / "out", prompts, without=[17])


async def test_a_prompt_that_one_server_dropped_and_another_stored_is_not_blamed_later(
    tmp_path: Path, dump_root: Path, notes: Notes, prompts: list[Ids], path: Path
) -> None:
    """Its server dies when the prompt is long stored: only what it has unanswered is suspect."""
    flaky = ("--fault", "reset", "--fault-row", "3", "--delay-s", "0.02")
    async with process(dump_root, *flaky) as one:
        steady = FakeServer(dump_root, delay_s=0.02)

        def has_three() -> bool:
            return 3 in ordinals_sent(steady.requests)

        async with steady.running():
            options = options_of([one, steady], dump_root, path, tmp_path / "out")
            running = asyncio.create_task(run(options, notes))
            while not has_three():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)  # answered, and stored
            one.process.kill()
            await asyncio.to_thread(one.process.wait)
            summary = await running
    assert summary.totals.by_reason == {}
    assert_whole(tmp_path / "out", prompts)


async def test_a_prompt_that_is_always_refused_does_not_block_the_others(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    """The budget holds one dump: while the refused prompt waits, others are sent."""
    num_tokens = 1024
    prompts = make_prompts(20, shortest=num_tokens, longest=num_tokens)
    path = write_prompts(tmp_path / "p.jsonl", prompts)

    def refuse(number: int, rid: str) -> Fault | None:
        return Fault.BUSY if ordinals_sent([rid]) == [0] else None

    async with FakeServer(dump_root, faults=refuse).running() as server:
        limits = Limits(max_prompt_tokens=4096, vocab_size=9, chunk_tokens=4096)
        need = dump_bytes(num_tokens, LAYOUT, limits)
        options = options_of([server], dump_root, path, tmp_path / "out", shm_budget_bytes=need)
        timings = quick(health={"refused_open_s": 0.0, "trial_pause_s": 0.01})
        summary = await run(options, notes, timings=timings)
    assert summary.totals.by_state == {State.STORED: 19, State.FAILED: 1}
    assert summary.totals.by_reason == {Reason.SERVER_ERROR: 1}


# --- files that may be open -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("soft", "hard", "num_servers", "each", "raised"),
    [
        (1024, 4096, 1, 512, None),
        (1024, 4096, 8, 496, 4096),
        (1024, 1024, 8, 112, 1024),
        (128, 128, 2, 1, 128),
        (1024, -1, 8, 512, 8 * 512 + 128),
        (-1, -1, 8, 512, None),
    ],
)
def test_connections_fit_the_files_that_may_be_open(
    monkeypatch: pytest.MonkeyPatch,
    soft: int,
    hard: int,
    num_servers: int,
    each: int,
    raised: int | None,
) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: set_to.append(limits))
    assert connections_each(num_servers) == each
    assert set_to == ([] if raised is None else [(raised, hard)])


@pytest.mark.parametrize(
    ("concurrency", "num_servers", "most"),
    [(73, 1, 72), (5000, 1, 72), (37, 2, 36), (72, 1, None), (36, 2, None), (None, 2, None)],
)
def test_a_concurrency_beyond_the_limit_of_open_files_is_refused(
    monkeypatch: pytest.MonkeyPatch, concurrency: int | None, num_servers: int, most: int | None
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (200, 200))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: None)
    if most is None:
        require_connections(concurrency, num_servers=num_servers)
        return
    assert concurrency is not None
    needed = concurrency * num_servers + 128
    with pytest.raises(UsageError, match=rf"--concurrency {concurrency} .*needs {needed:,} open f"):
        require_connections(concurrency, num_servers=num_servers)
    with pytest.raises(UsageError, match=rf"limit of this process is 200\. .* {most} or less"):
        require_connections(concurrency, num_servers=num_servers)

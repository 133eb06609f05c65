"""Sessions and servers that compute other states are refused, naming the facts that differ."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack, closing
from pathlib import Path

import numpy as np
import orjson
import pytest
from helpers import (
    LAYOUT,
    Ids,
    Notes,
    change_ready,
    changed,
    make_prompts,
    options_for,
    ordinals_sent,
    read_samples,
    rows_of,
    run,
    servers_of,
    write_prompts,
)

from extractor.core.errors import ConfigMismatch, Interrupted, PluginError, first_known
from extractor.core.run_options import RunOptions
from extractor.testing.fake_model import FakeModel, fake_states
from extractor.testing.fake_server import FakeServer
from extractor.testing.faults import FaultPlan
from extractor.verify.audit import audit
from extractor.verify.findings import FindingKind
from manifest.records import ServerStart
from manifest.states import State
from manifest.store import Store
from server_patch.dump_format import decode_ready, encode_ready

NUM_ROWS = 40


@pytest.fixture
def prompts() -> list[Ids]:
    return make_prompts(NUM_ROWS, shortest=5)


@pytest.fixture
def path(tmp_path: Path, prompts: list[Ids]) -> Path:
    return write_prompts(tmp_path / "p.jsonl", prompts)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def starts_of(out: Path) -> list[ServerStart]:
    with closing(Store.open_read_only(out / "manifest.sqlite")) as store:
        return store.server_starts()


def checkpoints_of(out: Path, prompts: list[Ids]) -> dict[int, int]:
    """Ordinal of each stored sample -> the fake checkpoint whose states it holds."""
    found: dict[int, int] = {}
    for ordinal, sample in read_samples(out).items():
        ids = np.array(prompts[ordinal].ids, dtype=np.int32)
        (found[ordinal],) = (
            checkpoint
            for checkpoint in (0, 1)
            if np.array_equal(
                sample.states["last"],
                fake_states(ids, LAYOUT, checkpoint=checkpoint)["last"],
            )
        )
    return found


async def refused(options: RunOptions, notes: Notes) -> str:
    with pytest.raises((ConfigMismatch, ExceptionGroup)) as caught:
        await run(options, notes)
    error = first_known(caught.value)
    assert isinstance(error, ConfigMismatch), error
    return str(error)


def at_request(number: int, act: Callable[[], None]) -> FaultPlan:
    """Call `act` when request `number` arrives; not a fault."""

    def plan(arrived: int, rid: str) -> None:
        if arrived == number:
            act()

    return plan


async def stopped_half_way(
    dump_root: Path, path: Path, out: Path, notes: Notes, model: FakeModel
) -> None:
    """Run a session that a signal ends when some rows are stored."""
    stop = at_request(15, lambda: os.kill(os.getpid(), signal.SIGINT))
    async with FakeServer(dump_root, model=model, faults=stop).running() as server:
        with pytest.raises((Interrupted, ExceptionGroup)):
            await run(options_for(server, path, out, concurrency=2), notes)
    stored = sum(row.state is State.STORED for row in rows_of(out))
    assert 0 < stored < NUM_ROWS


#: Other models, each with a different announced fact, and the name of that fact.
OTHER_MODELS: dict[str, tuple[FakeModel, str]] = {
    "weights": (FakeModel(checkpoint=1), f"weights: was {0:032x}, is {1:032x}"),
    "kv_cache_dtype": (FakeModel(kv_cache_dtype="fp8_e5m2"), "kv_cache_dtype: was auto, is fp8"),
}


@pytest.mark.parametrize("name", sorted(OTHER_MODELS))
async def test_a_session_with_another_model_is_refused_by_name_and_sends_nothing(
    dump_root: Path, path: Path, out: Path, notes: Notes, name: str
) -> None:
    await stopped_half_way(dump_root, path, out, notes, FakeModel())
    before = servers_of(out)
    model, told = OTHER_MODELS[name]
    async with FakeServer(dump_root, model=model).running() as server:
        message = await refused(options_for(server, path, out), notes)
        assert not server.requests  # not even a probe
    assert told in message
    assert str(out) in message and "--allow-model-change" in message
    assert servers_of(out) == before
    assert len(starts_of(out)) == 1


class NamelessModel(FakeModel):
    """The model of a server whose plugin could not compute a fingerprint."""

    @property
    def weights(self) -> None:  # type: ignore[override]
        return None


#: Another checkpoint that announces the fingerprint of the first.
DISGUISED = FakeModel(checkpoint=1, fingerprint=0)


async def test_the_canary_detects_a_change_that_the_server_does_not_announce(
    dump_root: Path, path: Path, out: Path, notes: Notes
) -> None:
    await stopped_half_way(dump_root, path, out, notes, FakeModel())
    async with FakeServer(dump_root, model=DISGUISED).running() as server:
        message = await refused(options_for(server, path, out), notes)
        assert ordinals_sent(server.requests) == []  # only the probe
    assert "canary:" in message and "tolerance 0.08" in message
    assert len(starts_of(out)) == 1


async def test_a_run_continues_with_the_same_model_and_records_each_start(
    dump_root: Path, path: Path, out: Path, notes: Notes, prompts: list[Ids]
) -> None:
    await stopped_half_way(dump_root, path, out, notes, FakeModel())
    # These change rounding only: they are recorded, and the canary confirms it.
    model = FakeModel(settings={"device": "other", "attention_backend": "fa3"})
    async with FakeServer(dump_root, model=model, chunk_tokens=7).running() as server:
        await run(options_for(server, path, out), notes)
    first, second = starts_of(out)
    assert (first.session, second.session) == (0, 1)
    assert (first.canary_error, second.canary_error) == (None, 0.0)
    assert first.accepted == second.accepted == ()
    assert second.facts["settings"] == {"attention_backend": "fa3", "device": "other"}
    assert set(servers_of(out).values()) == {0, 1}
    assert set(checkpoints_of(out, prompts).values()) == {0}
    document = orjson.loads((out / "dataset.json").read_bytes())
    assert [
        (session["session"], [served["boot_id"] for served in session["servers"]])
        for session in document["sessions"]
    ] == [(0, [first.boot_id]), (1, [second.boot_id])]
    assert audit(out).is_clean


@pytest.mark.parametrize("model", [FakeModel(checkpoint=1), DISGUISED])
async def test_a_deliberate_change_needs_an_option_and_is_recorded(
    dump_root: Path, path: Path, out: Path, notes: Notes, prompts: list[Ids], model: FakeModel
) -> None:
    await stopped_half_way(dump_root, path, out, notes, FakeModel())
    before = {row.ordinal for row in rows_of(out) if row.state is State.STORED}
    async with FakeServer(dump_root, model=model).running() as server:
        await run(options_for(server, path, out, allow_model_change=True), notes)
    _, second = starts_of(out)
    is_disguised = model is DISGUISED
    assert second.accepted == (("canary",) if is_disguised else ("weights", "canary"))
    # Each row names the server start that computed it, and holds that server's states.
    made_by = servers_of(out)
    assert made_by == checkpoints_of(out, prompts)
    assert {ordinal for ordinal, number in made_by.items() if number == 0} == before
    document = orjson.loads((out / "dataset.json").read_bytes())
    assert document["sessions"][1]["servers"][0]["accepted"] == list(second.accepted)
    # From now on the new model is the reference: going back to the old one is a change again.
    async with FakeServer(dump_root).running() as server:
        options = options_for(server, path, out, retry_failed=True)
        if is_disguised:
            await run(options, notes)  # all rows are settled: the canary is not requested
        else:
            assert "weights: was" in await refused(options, notes)
    assert audit(out).is_clean


@pytest.mark.parametrize(
    ("field", "value"), [("weights", f"{1:032x}"), ("boundaries", (1, 2)), ("dtype", "F16")]
)
async def test_data_parallel_ranks_that_differ_are_refused_by_field(
    dump_root: Path, path: Path, out: Path, notes: Notes, field: str, value: object
) -> None:
    async with FakeServer(dump_root).running() as server:
        ready = decode_ready((server.directory / "READY.json").read_bytes())
        second = server.directory.with_name("1")
        second.mkdir()
        for directory, rank in (
            (server.directory, change_ready(ready, dp_size=2)),
            (second, change_ready(ready, dp_size=2, rank=1, **{field: value})),
        ):
            (directory / "READY.json").write_bytes(encode_ready(rank))
        with pytest.raises(PluginError, match=f"ranks 0 and 1 differ in {field}: "):
            await run(options_for(server, path, out), notes)
        assert server.requests == []


async def test_servers_of_one_run_whose_canaries_differ_are_refused_even_where_a_change_is_allowed(
    dump_root: Path, path: Path, out: Path, notes: Notes
) -> None:
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(FakeServer(dump_root).running())
        two = await stack.enter_async_context(FakeServer(dump_root, model=DISGUISED).running())
        options = options_for(one, path, out, allow_model_change=True)
        message = await refused(changed(options, server_urls=(one.url, two.url)), notes)
        assert f"the servers at {one.url} and {two.url} differ:\n  canary: " in message
        assert ordinals_sent([*one.requests, *two.requests]) == []


async def test_weights_that_are_updated_during_a_run_end_it_and_no_row_of_them_is_stored(
    dump_root: Path, path: Path, out: Path, notes: Notes, prompts: list[Ids]
) -> None:
    model = FakeModel()
    server = FakeServer(dump_root, model=model)

    def update() -> None:
        model.checkpoint = 1  # later dumps carry its id; the run read READY.json at its start

    server._faults = at_request(30, update)
    async with server.running():
        message = await refused(options_for(server, path, out, concurrency=2), notes)
    assert "were updated during the run" in message
    assert f"they were {0:032x} when it began" in message
    # The same command against the old weights finishes the rest.
    async with FakeServer(dump_root).running() as server:
        await run(options_for(server, path, out), notes)
    assert set(checkpoints_of(out, prompts).values()) == {0}
    assert audit(out).is_clean


async def test_a_reply_of_another_weight_version_ends_the_run(
    dump_root: Path, path: Path, out: Path, notes: Notes
) -> None:
    model = FakeModel()
    server = FakeServer(dump_root, model=model)
    server._faults = at_request(12, lambda: setattr(model, "weight_version", "step-2"))
    async with server.running():
        message = await refused(options_for(server, path, out, concurrency=2), notes)
    assert "weight version" in message and "'default'" in message and "'step-2'" in message


async def test_a_server_without_a_fingerprint_is_used_with_a_warning(
    dump_root: Path, path: Path, out: Path, notes: Notes
) -> None:
    server = FakeServer(dump_root, model=NamelessModel())
    async with server.running():
        await run(options_for(server, path, out), notes)
    (warning,) = (note for note in notes.messages if "fingerprint" in note)
    assert f"the plugin of {server.url} has no fingerprint of the weights" in warning
    (start,) = starts_of(out)
    assert start.facts["weights"] is None
    assert audit(out).is_clean


#: A data set of the last version that recorded no server starts; stopped with some rows stored.
OLD_VERSION = Path(__file__).parents[1] / "old_version"


async def test_a_data_set_of_an_older_version_goes_on_and_gets_its_canary(
    dump_root: Path, tmp_path: Path, notes: Notes, prompts: list[Ids]
) -> None:
    out = shutil.copytree(OLD_VERSION / "out", tmp_path / "out")
    path = OLD_VERSION / "prompts.jsonl"
    assert path.read_text() == write_prompts(tmp_path / "p.jsonl", prompts).read_text()
    async with FakeServer(dump_root).running() as server:
        await run(options_for(server, path, out), notes)
    (start,) = starts_of(out)
    assert start.canary_error == 0.0  # against a stored sample
    assert set(servers_of(out).values()) == {None, 0}
    assert checkpoints_of(out, prompts) == dict.fromkeys(range(NUM_ROWS), 0)
    found = audit(out)
    assert found.is_clean
    assert found.contents.num_unattributed == sum(
        number is None for number in servers_of(out).values()
    )
    assert "stored by an older version" in found.to_text()
    async with FakeServer(dump_root, model=FakeModel(checkpoint=1)).running() as server:
        assert "weights: was" in await refused(options_for(server, path, out), notes)


@pytest.mark.parametrize("allowed", [False, True])
async def test_a_data_set_of_an_older_version_is_compared_by_a_stored_sample(
    dump_root: Path, tmp_path: Path, notes: Notes, prompts: list[Ids], allowed: bool
) -> None:
    out = shutil.copytree(OLD_VERSION / "out", tmp_path / "out")
    path = OLD_VERSION / "prompts.jsonl"
    async with FakeServer(dump_root, model=FakeModel(checkpoint=1)).running() as server:
        options = options_for(server, path, out, allow_model_change=allowed)
        if not allowed:
            assert "  canary: " in await refused(options, notes)
            assert ordinals_sent(server.requests) == []
            return
        await run(options, notes)
    (start,) = starts_of(out)
    assert start.accepted == ("canary",)
    assert start.canary_error is not None and start.canary_error > 0.5
    made_by = servers_of(out)
    assert checkpoints_of(out, prompts) == {
        ordinal: 0 if number is None else 1 for ordinal, number in made_by.items()
    }
    assert audit(out).is_clean


async def test_a_finished_data_set_of_an_older_version_is_still_clean(
    dump_root: Path, tmp_path: Path, notes: Notes
) -> None:
    """Nothing is extracted any more, so its files stay as the older version wrote them."""
    out = shutil.copytree(OLD_VERSION / "out", tmp_path / "out")
    before = (out / "dataset.json").read_bytes()
    manifest = (out / "manifest.sqlite").read_bytes()
    found = audit(out)
    assert {finding.kind for finding in found.findings.all} <= {
        FindingKind.ROW_UNFINISHED,
        FindingKind.ROWS_UNACCOUNTED,
        FindingKind.SHARD_UNSEALED,
    }
    assert found.contents.starts == []
    assert (out / "dataset.json").read_bytes() == before
    assert (out / "manifest.sqlite").read_bytes() == manifest  # read as a copy

"""What the movers tell of samples, whenever they are stopped."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import Notes, make_identity, make_prompts, prompt_of

from extractor.core.counters import Counters
from extractor.core.timings import StoreTimings
from extractor.dispatch.row_recorder import RowRecorder
from extractor.shards.mover import Mover
from extractor.shards.sequence import ShardSequence
from extractor.shards.writer import ShardSettings, ShardWriter
from integration.test_shards import Dumps
from manifest.records import Change, Planned, PromptFacts, Source, SourceRow
from manifest.states import State
from manifest.store import Store
from manifest.writer_thread import StoreOwner
from prompts.types import Prompt
from server_patch.directory import Directory


@pytest.fixture
def settings(tmp_path: Path) -> ShardSettings:
    for name in ("shards", "dumps"):
        (tmp_path / name).mkdir()
    return ShardSettings(
        directory=Directory.open(tmp_path / "shards"),
        file_mode=0o640,
        shard_bytes=1 << 20,
        identity=make_identity(),
    )


async def owner_of(path: Path, prompts: Sequence[Prompt]) -> StoreOwner:
    """A manifest in which all of `prompts` are planned."""
    owner = await StoreOwner.open(path)
    source = Source(number=0, path="p", size_bytes=1, digest="d", num_rows=len(prompts))
    await owner.call(lambda store: store.begin({}, [source]))
    for prompt in prompts:
        await owner.commit(
            Planned(
                origin=SourceRow(ordinal=prompt.ordinal, source=0, line=1),
                prompt=PromptFacts(key=prompt.key, num_tokens=prompt.num_tokens, num_trained=0),
            )
        )
    return owner


def mover_of(shards: ShardSequence, owner: StoreOwner, counters: Counters) -> Mover:
    recorder = RowRecorder(owner, counters, Notes(), files=(), server_of=lambda boot_id: None)
    return Mover(shards, recorder, counters.stages, StoreTimings())


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_each_sample_that_the_manifest_has_is_counted_once(
    is_cancelled: bool, tmp_path: Path, settings: ShardSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the run is cancelled in the midst of the commit, which nothing takes back."""
    (row,) = make_prompts(1)
    prompt, pieces = prompt_of(row), Dumps(tmp_path / "dumps").make(row)
    owner = await owner_of(tmp_path / "manifest.sqlite", [prompt])
    is_reached, may_go_on, apply = threading.Event(), threading.Event(), Store.apply

    def gated(store: Store, changes: list[Change]) -> None:
        is_reached.set()
        assert may_go_on.wait(30)
        apply(store, changes)

    monkeypatch.setattr(Store, "apply", gated)
    counters = Counters()
    shards = ShardSequence(settings, owner, numbers=itertools.count(), rows=counters.rows)
    mover = mover_of(shards, owner, counters)
    tasks = [
        asyncio.create_task(mover.run()),
        asyncio.create_task(mover.store(prompt, pieces, attempts=1)),
    ]
    assert await asyncio.to_thread(is_reached.wait, 30)
    assert counters.rows.stored == 0
    if is_cancelled:
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
    may_go_on.set()
    if not is_cancelled:
        assert await tasks[1] is None
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    (stored,) = await owner.call(lambda store: list(store.rows()))
    assert stored.state is State.STORED
    assert (counters.rows.stored, counters.tokens) == (1, prompt.num_tokens)
    await shards.close(seal=False)
    await owner.close()


async def test_a_shard_that_is_being_sealed_when_the_run_is_cancelled_keeps_its_file(
    tmp_path: Path, settings: ShardSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor closed under the thread is the next file's that anybody opens: the seal would
    cut that one, and write over its beginning."""
    rows, dumps = make_prompts(2), Dumps(tmp_path / "dumps")
    prompts = [prompt_of(row, ordinal=ordinal) for ordinal, row in enumerate(rows)]
    owner = await owner_of(tmp_path / "manifest.sqlite", prompts)
    is_reached, may_go_on, seal = threading.Event(), threading.Event(), ShardWriter.seal

    def gated(writer: ShardWriter) -> str:
        is_reached.set()
        assert may_go_on.wait(30)
        return seal(writer)

    monkeypatch.setattr(ShardWriter, "seal", gated)
    counters = Counters()
    settings = replace(settings, shard_bytes=1)  # each sample begins a new one
    shards = ShardSequence(settings, owner, numbers=itertools.count(), rows=counters.rows)
    mover = mover_of(shards, owner, counters)
    tasks = [
        asyncio.create_task(mover.run()),
        *(
            asyncio.create_task(mover.store(prompt, dumps.make(row), attempts=1))
            for prompt, row in zip(prompts, rows, strict=True)
        ),
    ]
    assert await asyncio.to_thread(is_reached.wait, 30)
    tasks[0].cancel()
    await asyncio.wait(tasks[:1])
    may_go_on.set()
    await shards.close(seal=False)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert [path.name for path in settings.directory.path.iterdir()] == ["shard-000000.safetensors"]
    await owner.close()

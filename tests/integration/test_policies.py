"""What a run makes of rows that are not as they should be, against the fake server."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import (
    Ids,
    Notes,
    assert_whole,
    make_prompts,
    options_for,
    read_samples,
    rows_of,
    run,
    write_prompts,
)
from templates import QWEN3, tokenizer_for

from extractor.core.errors import ConfigMismatch, first_known
from extractor.core.row_policy import OnBadRow, OnDuplicate, OnTooLong, Policy
from extractor.core.timings import StoreTimings, Timings
from extractor.testing.fake_server import FakeServer
from manifest.states import Reason, State
from prompts.inputs import RawRow
from prompts.pool import RendererPool
from prompts.reading_options import ReadingOptions, Thinking
from prompts.types import BadRow, Prompt


async def test_case_93_long_prompts_are_cut_when_asked_and_their_length_is_kept(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    prompts = make_prompts(6, shortest=30, longest=60)
    path = write_prompts(tmp_path / "p.jsonl", prompts)
    policy = Policy(on_too_long=OnTooLong.TRUNCATE, max_tokens=40)
    async with FakeServer(dump_root).running() as server:
        options = options_for(server, path, tmp_path / "out", policy=policy)
        summary = await run(options, notes)
    cut = [Ids(ids=row.ids[:40], mask=row.mask[:40]) for row in prompts]
    assert_whole(tmp_path / "out", cut)
    was_cut = {n for n, row in enumerate(prompts) if len(row.ids) > 40}
    assert summary.totals.by_alteration == {"truncated": len(was_cut)}
    for row in rows_of(tmp_path / "out"):
        length = len(prompts[row.ordinal].ids)
        expected = f"cut from {length} tokens" if row.ordinal in was_cut else None
        assert (row.detail, row.prompt and row.prompt.num_tokens) == (expected, min(length, 40))


async def test_padding_is_not_sent_and_prompts_that_train_too_little_fail_when_asked(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    path = tmp_path / "p.jsonl"
    rows = [
        {"input_ids": [9, 5, 6, 7, 9], "attention_mask": [0, 1, 1, 1, 0], "labels": [-100] * 5},
        {"input_ids": [5, 6, 7, 9], "attention_mask": [1, 1, 1, 0], "labels": [-100, 6, 7, -100]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    async with FakeServer(dump_root).running() as server:
        options = options_for(server, path, tmp_path / "out", policy=Policy(min_trained=1))
        summary = await run(options, notes)
    assert summary.totals.by_reason == {Reason.TOO_FEW_TRAINED: 1}
    assert summary.totals.by_alteration == {"padding_cut": 1}
    sent = Ids(ids=(5, 6, 7), mask=(0, 1, 1))
    assert_whole(tmp_path / "out", [sent, sent], without=[0])


async def test_case_88_duplicates_are_left_out_when_asked_and_are_no_failures(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    prompts = make_prompts(3)
    path = write_prompts(tmp_path / "p.jsonl", [*prompts, prompts[1], prompts[0]])
    policy = Policy(on_duplicate=OnDuplicate.SKIP)
    async with FakeServer(dump_root).running() as server:
        options = options_for(server, path, tmp_path / "out", policy=policy)
        summary = await run(options, notes)
        again = await run(options, notes)
    assert summary.totals.by_reason == again.totals.by_reason == {Reason.DUPLICATE: 2}
    assert (summary.num_failed, summary.totals.by_state[State.FAILED]) == (0, 2)
    assert set(read_samples(tmp_path / "out")) == {0, 1, 2}
    details = {row.ordinal: row.detail for row in rows_of(tmp_path / "out") if row.detail}
    assert details == {3: "row 1 gives the same prompt", 4: "row 0 gives the same prompt"}


async def test_a_bad_row_stops_the_run_when_asked_and_what_was_stored_stays(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    prompts = make_prompts(3)
    path = write_prompts(tmp_path / "p.jsonl", prompts)
    with path.open("a") as file:
        file.write("{}\n")
    async with FakeServer(dump_root).running() as server:
        strict = options_for(
            server, path, tmp_path / "out", policy=Policy(on_bad_row=OnBadRow.FAIL)
        )
        with pytest.raises(BaseException) as caught:
            await run(strict, notes)
        assert str(first_known(caught.value)).startswith(f"{path}:4: unknown_shape: ")
        # How to go about bad rows is no part of what the data set is of.
        summary = await run(options_for(server, path, tmp_path / "out"), notes)
    assert summary.totals.by_reason == {Reason.UNKNOWN_SHAPE: 1}
    assert_whole(tmp_path / "out", [*prompts, prompts[0]], without=[3])


async def test_other_wishes_for_a_begun_data_set_are_refused_by_name_without_a_server(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    path = write_prompts(tmp_path / "p.jsonl", make_prompts(3))
    async with FakeServer(dump_root).running() as server:
        await run(options_for(server, path, tmp_path / "out"), notes)
    other = options_for(
        server, path, tmp_path / "out", reading=ReadingOptions(thinking=Thinking.DROP)
    )
    with pytest.raises(ConfigMismatch, match=r"--thinking: .* 'template', .* 'drop'"):
        await run(other, notes)


async def test_a_file_of_bad_rows_does_not_pile_up(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    timings = Timings(store=StoreTimings(rejections=10))
    path = tmp_path / "p.jsonl"
    path.write_text("{}\n" * 500 + '{"input_ids": [1, 2]}\n')
    async with FakeServer(dump_root).running() as server:
        summary = await run(options_for(server, path, tmp_path / "out"), notes, timings=timings)
    assert summary.totals.by_reason == {Reason.UNKNOWN_SHAPE: 500}
    assert set(read_samples(tmp_path / "out")) == {500}


async def test_a_run_that_goes_on_tokenises_only_what_is_not_done(
    tmp_path: Path, dump_root: Path, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer_for(QWEN3).save_pretrained(tmp_path / "tokenizer")
    path = tmp_path / "p.jsonl"
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "fine"}]
    path.write_text("".join(json.dumps({"id": n, "messages": turns}) + "\n" for n in range(8)))
    tokenised: list[int] = []
    original = RendererPool.prompts_from

    def watched(rows: Iterable[RawRow]) -> Iterator[RawRow]:
        for row in rows:
            tokenised.append(row.ordinal)
            yield row

    def prompts_from(
        pool: RendererPool, rows: Iterable[RawRow], **options: int
    ) -> Iterator[Prompt | BadRow]:
        return original(pool, watched(rows), **options)

    monkeypatch.setattr(RendererPool, "prompts_from", prompts_from)
    with path.open("a") as file:
        file.write("{}\n")
    async with FakeServer(dump_root).running() as server:
        options = options_for(server, path, tmp_path / "out", tokenizer=str(tmp_path / "tokenizer"))
        await run(options, notes)
        assert tokenised == list(range(9))
        tokenised.clear()
        await run(replace(options, retry_failed=True), notes)
    assert tokenised == [*range(8), 8]  # stored rows are rendered again for comparison

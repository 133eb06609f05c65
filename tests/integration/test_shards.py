"""Shard files: what is written is what any safetensors reader gets."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import safetensors
import xxhash
from helpers import (
    LAYOUT,
    Ids,
    deserialize,
    make_header,
    make_identity,
    make_prompts,
    prompt_of,
)

from extractor.core.errors import UsageError
from extractor.core.run_options import Output
from extractor.dumps.correlator import Piece
from extractor.dumps.dump_piece import SampleFault
from extractor.dumps.dump_reader import DumpFile, DumpPiece
from extractor.shards.sample_copy import BLOCK_BYTES
from extractor.shards.writer import ShardSettings, ShardWriter, lost_rows, sealed_on_disk
from extractor.system.direct_io import ALIGNMENT
from extractor.testing.fake_model import fake_states
from manifest.records import PromptFacts, Shard, StoredRow, StoredSample
from manifest.states import Reason
from server_patch.directory import Directory
from server_patch.dump_format import StateLayout, encode_header, read_beginning


class Dumps:
    """Writes a prompt's dumps as the plugin would, in pieces of some rows; read whole or not."""

    def __init__(
        self, directory: Path, layout: StateLayout = LAYOUT, *, are_read_whole: bool = False
    ) -> None:
        self._directory = directory
        self._are_read_whole = are_read_whole
        self._layout = layout
        self._counter = count()

    def make(self, row: Ids, *, step: int = 1000, nan_at: int | None = None) -> list[DumpPiece]:
        ids = np.array(row.ids, dtype=np.int32)
        states = fake_states(ids, self._layout)
        if nan_at is not None:
            states["last"][nan_at] = 0x7F80
        pieces = []
        for start in range(0, len(ids), step):
            end = min(start + step, len(ids))
            counter = next(self._counter)
            header = make_header(
                start=start, rows=end - start, counter=counter, dtype=self._layout.dtype,
                last_kind=self._layout.last_kind, boundaries=self._layout.boundaries,
                hidden_size=self._layout.hidden_size,
            )  # fmt: skip
            path = self._directory / f"{counter:010d}.safetensors"
            parts = [states[name][start:end].tobytes() for name in self._layout.state_names]
            path.write_bytes(encode_header(header) + b"".join(parts) + ids[start:end].tobytes())
            place = Directory.open(self._directory)
            dump, content = read_beginning(place, path.name, whole_bytes=1 << 20)
            handle = DumpFile(place, path.name, dump, content if self._are_read_whole else None)
            pieces.append(Piece(start=start, rows=end - start, handle=handle))
        return pieces


@pytest.fixture
def settings(tmp_path: Path) -> ShardSettings:
    (tmp_path / "shards").mkdir()
    return ShardSettings(
        output=Output(directory=tmp_path, shard_bytes=1 << 20, file_mode=0o640),
        identity=make_identity(),
    )


@pytest.fixture
def dumps(tmp_path: Path) -> Dumps:
    (tmp_path / "dumps").mkdir()
    return Dumps(tmp_path / "dumps")


def row_of(ordinal: int, sample: StoredSample, num_tokens: int) -> StoredRow:
    prompt = PromptFacts(key="k", num_tokens=num_tokens, num_trained=0)
    return StoredRow(ordinal=ordinal, prompt=prompt, sample=sample)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("last_kind", ["post", "pre", "both"])
@pytest.mark.parametrize("are_read_whole", [True, False])
def test_the_safetensors_library_gives_back_every_value(
    tmp_path: Path, settings: ShardSettings, dtype: str, last_kind: str, are_read_whole: bool
) -> None:
    layout = StateLayout(boundaries=(1, 2), hidden_size=6, dtype=dtype, last_kind=last_kind)
    identity = make_identity(boundaries=(1, 2), hidden_size=6, dtype=dtype, last_kind=last_kind)
    settings = replace(settings, identity=identity)
    dumps = Dumps(tmp_path, layout, are_read_whole=are_read_whole)
    writer = ShardWriter.create(settings, number=3, expected_samples=10)
    prompts = make_prompts(5)
    for ordinal, row in enumerate(prompts):
        writer.append(prompt_of(row, ordinal=ordinal), dumps.make(row, step=7))
    writer.sync()
    writer.seal()
    writer.close()
    path = settings.directory / "shard-000003.safetensors"
    assert path.stat().st_mode & 0o777 == 0o640
    content = dict(deserialize(path.read_bytes()))
    assert len(content) == 5 * (len(layout.state_names) + 2)
    for ordinal, row in enumerate(prompts):
        states = fake_states(np.array(row.ids, dtype=np.int32), layout)
        for name, values in states.items():
            entry = content[f"{ordinal:08d}.{name}"]
            assert (entry["dtype"], tuple(entry["shape"])) == (dtype, values.shape)
            assert bytes(entry["data"]) == values.tobytes()
        for name, expected in (("input_ids", row.ids), ("loss_mask", row.mask)):
            data = bytes(content[f"{ordinal:08d}.{name}"]["data"])
            assert np.frombuffer(data, dtype="<i4").tolist() == list(expected)
    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.metadata()["boundaries"] == "1,2"
        assert file.metadata()["layer_outputs"] == "0,1"


def test_a_sample_longer_than_a_block_is_copied_whole(
    tmp_path: Path, settings: ShardSettings, dumps: Dumps
) -> None:
    (row,) = make_prompts(1, shortest=40_000, longest=40_000)
    assert 40_000 * 48 > BLOCK_BYTES
    writer = ShardWriter.create(settings, number=0, expected_samples=1)
    stored = writer.append(prompt_of(row), dumps.make(row, step=25_001))
    writer.seal()
    writer.close()
    data = (settings.directory / "shard-000000.safetensors").read_bytes()
    sample = data[stored.offset : stored.end]
    assert xxhash.xxh3_128_hexdigest(sample) == stored.digest
    states = fake_states(np.array(row.ids, dtype=np.int32), LAYOUT)
    assert sample.startswith(states["aux"].tobytes() + states["last"].tobytes())


def test_samples_follow_each_other_without_holes(settings: ShardSettings, dumps: Dumps) -> None:
    writer = ShardWriter.create(settings, number=0, expected_samples=10)
    end = writer.shard.data_start
    for ordinal, row in enumerate(make_prompts(6)):
        stored = writer.append(prompt_of(row, ordinal=ordinal), dumps.make(row, step=5))
        assert (stored.offset, stored.num_pieces) == (end, -(-len(row.ids) // 5))
        end += stored.size_bytes
    assert writer.position == end
    writer.close()


@pytest.mark.parametrize("fault", ["ids", "nan", "gone", "cut"])
def test_a_bad_sample_leaves_the_shard_as_it_was(
    settings: ShardSettings, dumps: Dumps, fault: str
) -> None:
    good, bad, next_good = make_prompts(3, shortest=20)
    writer = ShardWriter.create(settings, number=0, expected_samples=10)
    writer.append(prompt_of(good), dumps.make(good))
    before = writer.position
    pieces = dumps.make(bad, step=8, nan_at=19 if fault == "nan" else None)
    prompt = prompt_of(bad, ordinal=1)
    if fault == "ids":
        prompt.input_ids[10] += 1
    if fault == "gone":
        pieces[1].handle.path.unlink()
    if fault == "cut":
        os.truncate(pieces[1].handle.path, pieces[1].handle.dump.size_bytes - 40)
    with pytest.raises(SampleFault) as caught:
        writer.append(prompt, pieces)
    assert caught.value.failure.reason is {
        "ids": Reason.WRONG_TOKENS,
        "nan": Reason.NONFINITE,
        "gone": Reason.DUMP_MISSING,
        "cut": Reason.DUMP_CORRUPT,
    }[fault]  # fmt: skip
    if fault == "nan":
        assert caught.value.failure.detail == "last holds NaN or infinity at row 19"
    assert (writer.position, writer.num_samples) == (before, 1)
    stored = writer.append(prompt_of(next_good, ordinal=2), dumps.make(next_good))
    assert stored.offset == before
    writer.close()


def test_a_shard_goes_on_behind_its_durable_samples(settings: ShardSettings, dumps: Dumps) -> None:
    """What a dead session wrote behind them is overwritten, and cut off if it was longer."""
    one, lost, two = make_prompts(3, shortest=20)
    writer = ShardWriter.create(settings, number=0, expected_samples=10)
    kept = writer.append(prompt_of(one), dumps.make(one))
    writer.append(prompt_of(lost, ordinal=1), dumps.make(lost))
    writer.close()
    shard = Shard(
        number=0, name="shard-000000.safetensors", data_start=writer.shard.data_start,
        is_sealed=False, size_bytes=kept.end, num_samples=1,
    )  # fmt: skip
    again = ShardWriter.resume(settings, shard, [row_of(0, kept, len(one.ids))])
    assert again.position == kept.end
    short = Ids(ids=two.ids[:1], mask=two.mask[:1])
    stored = again.append(prompt_of(short, ordinal=2), dumps.make(short))
    again.seal()
    again.close()
    path = settings.directory / shard.name
    assert path.stat().st_size == stored.end
    names = {name for name, _ in deserialize(path.read_bytes())}
    assert {name.partition(".")[0] for name in names} == {"00000000", "00000002"}


def test_a_shard_without_durable_samples_begins_behind_its_header_room(
    settings: ShardSettings,
) -> None:
    writer = ShardWriter.create(settings, number=0, expected_samples=10)
    writer.close()
    again = ShardWriter.resume(settings, writer.shard, [])
    assert again.position == writer.shard.data_start
    again.close()
    again.discard()
    assert list(settings.directory.iterdir()) == []


def test_a_new_shard_does_not_take_over_an_old_file_of_its_name(
    settings: ShardSettings, dumps: Dumps
) -> None:
    (settings.directory / ".shard-000000.open").write_bytes(b"x" * 10_000_000)
    (row,) = make_prompts(1)
    writer = ShardWriter.create(settings, number=0, expected_samples=1)
    stored = writer.append(prompt_of(row), dumps.make(row))
    writer.sync()
    writer.close()
    size = (settings.directory / ".shard-000000.open").stat().st_size
    assert 0 <= size - (stored.end) < ALIGNMENT


def test_a_shard_is_full_by_size_or_by_header_but_takes_one_sample_always(
    settings: ShardSettings, dumps: Dumps
) -> None:
    rows = make_prompts(200, shortest=1, longest=1)
    writer = ShardWriter.create(settings, number=0, expected_samples=10)
    taken = 0
    while writer.has_room(1):
        writer.append(prompt_of(rows[taken], ordinal=taken), dumps.make(rows[taken]))
        taken += 1
    assert 10 <= taken < 50  # header room is kept in steps of a page
    assert not writer.has_room(1)
    writer.seal()  # and it fits
    writer.close()
    small = replace(settings, output=replace(settings.output, shard_bytes=1))
    writer = ShardWriter.create(small, number=1, expected_samples=10)
    assert writer.has_room(10_000)
    writer.append(prompt_of(rows[0]), dumps.make(rows[0]))
    assert not writer.has_room(1)
    writer.close()


def test_samples_whose_end_is_cut_off_are_lost_and_no_others(
    settings: ShardSettings, dumps: Dumps
) -> None:
    prompts = make_prompts(4, shortest=5)
    writer = ShardWriter.create(settings, number=0, expected_samples=10)
    rows = [
        row_of(n, writer.append(prompt_of(row, ordinal=n), dumps.make(row)), len(row.ids))
        for n, row in enumerate(prompts)
    ]
    writer.sync()
    shard = writer.shard
    path = settings.directory / ".shard-000000.open"
    assert lost_rows(settings.directory, shard, rows) == []
    os.truncate(path, rows[2].sample.offset + 1)
    assert lost_rows(settings.directory, shard, rows) == rows[2:]
    assert sealed_on_disk(settings.directory, shard, []) is None
    writer.close()
    path.unlink()
    assert lost_rows(settings.directory, shard, rows) == rows


def test_no_shard_replaces_a_sealed_file(settings: ShardSettings, dumps: Dumps) -> None:
    sealed = settings.directory / "shard-000000.safetensors"
    writer = ShardWriter.create(settings, number=0, expected_samples=10)
    (row,) = make_prompts(1)
    writer.append(prompt_of(row, ordinal=0), dumps.make(row))
    writer.sync()
    sealed.write_bytes(b"another's")
    with pytest.raises(UsageError, match="exists already"):
        writer.seal()
    writer.close()
    with pytest.raises(UsageError, match="exists already"):
        ShardWriter.create(settings, number=0, expected_samples=10)
    assert sealed.read_bytes() == b"another's"
    assert (settings.directory / ".shard-000000.open").stat().st_size == writer.position

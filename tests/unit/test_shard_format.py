"""The shard contract: any safetensors reader understands it, and its header always fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import LAYOUT, deserialize, make_identity
from hypothesis import given
from hypothesis import strategies as st

from extractor.core.errors import CorruptData, UsageError
from extractor.shards.format import (
    MAX_ROOM_BYTES,
    decode_shard_header,
    encode_shard_header,
    header_room,
    sample_bytes,
    sample_tensors,
    samples_expected,
    samples_that_fit,
    shard_metadata,
    tensor_name,
)
from manifest.records import shard_name
from server_patch.dump_format import StateLayout

layouts = st.builds(
    StateLayout,
    boundaries=st.sets(st.integers(0, 80), min_size=1, max_size=6).map(
        lambda found: tuple(sorted(found))
    ),
    hidden_size=st.integers(1, 4096).map(lambda half: 2 * half),
    dtype=st.sampled_from(["BF16", "F16", "F32"]),
    last_kind=st.sampled_from(["post", "pre", "both"]),
)
lengths = st.lists(st.integers(1, 5000), max_size=20)


@given(layouts, lengths)
def test_a_header_is_read_back_and_its_offsets_tile_the_data(
    layout: StateLayout, num_tokens: list[int]
) -> None:
    room = header_room(len(num_tokens), layout)
    samples = list(enumerate(num_tokens))
    header = encode_shard_header(samples, layout=layout, metadata={"a": "b"}, room_bytes=room)
    data = b"".join(header)
    assert len(data) == room
    entries = decode_shard_header(data)
    assert entries.pop("__metadata__") == {"a": "b"}
    end = 0
    for ordinal, count in samples:
        for tensor in sample_tensors(count, layout):
            entry = entries.pop(tensor_name(ordinal, tensor.name))
            assert entry["shape"] == list(tensor.shape)
            offsets = entry["data_offsets"]
            assert isinstance(offsets, list)
            begin, stop = offsets
            assert begin == end
            assert begin % 4 == 0  # readers that map the file need it
            end = stop
    assert entries == {}
    assert end == sum(sample_bytes(count, layout) for count in num_tokens)


@given(st.lists(st.integers(1, 50), max_size=6))
def test_the_safetensors_library_accepts_it(num_tokens: list[int]) -> None:
    room = header_room(len(num_tokens), LAYOUT)
    header = encode_shard_header(
        enumerate(num_tokens),
        layout=LAYOUT,
        metadata=shard_metadata(make_identity()),
        room_bytes=room,
    )
    data = b"".join(header) + bytes(sum(sample_bytes(count, LAYOUT) for count in num_tokens))
    names = [name for name, _ in deserialize(data)]
    assert len(names) == 4 * len(num_tokens)


@given(layouts, st.integers(0, 2000), st.integers(0, 10**9))
def test_samples_that_fit_never_overflow_the_room(
    layout: StateLayout, expected: int, first_ordinal: int
) -> None:
    """Even for the longest entries there can be."""
    room = header_room(expected, layout)
    fit = min(samples_that_fit(room, layout), 300)
    assert samples_that_fit(room, layout) >= expected
    samples = [(first_ordinal + n, 10**7) for n in range(fit)]
    metadata = shard_metadata(make_identity(model="m" * 4096, boundaries=layout.boundaries))
    tight = max(0, room - (samples_that_fit(room, layout) - fit) * 128 * len(layout.state_names))
    for _ in encode_shard_header(samples, layout=layout, metadata=metadata, room_bytes=tight):
        pass


def test_a_header_never_exceeds_what_readers_accept() -> None:
    assert header_room(10**9, LAYOUT) <= 100_000_000 + 8


def test_a_header_that_does_not_fit_is_refused() -> None:
    with pytest.raises(CorruptData, match="does not fit"):
        list(encode_shard_header([(0, 5)], layout=LAYOUT, metadata={}, room_bytes=100))


def test_a_large_header_comes_in_blocks_that_make_up_its_room() -> None:
    room = header_room(10_000, LAYOUT)
    samples = [(number, 5) for number in range(10_000)]
    blocks = list(encode_shard_header(samples, layout=LAYOUT, metadata={}, room_bytes=room))
    assert max(map(len, blocks)) < 2 << 20
    assert sum(map(len, blocks)) == room > 4 << 20


def test_an_odd_hidden_size_of_two_bytes_is_refused_before_anything_is_written() -> None:
    odd = StateLayout(boundaries=(1,), hidden_size=7, dtype="BF16", last_kind="post")
    with pytest.raises(UsageError, match="hidden size 7 is odd"):
        sample_tensors(1, odd)
    sample_tensors(1, replace(odd, dtype="F32"))


@pytest.mark.parametrize(
    "data",
    [b"", b"\x00" * 7, b"\xff" * 20, b"\x02" + b"\x00" * 7 + b"[]", b"\x02" + b"\x00" * 7 + b"{",
     b"\x60\xea" + b"\x00" * 6 + b"[" * 60_000, b"\x01" + b"\x00" * 7 + b"\xff"],
    ids=range(7),
)  # fmt: skip
def test_bytes_that_are_no_header_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptData):
        decode_shard_header(data)


@given(st.integers(1, 10**12), st.floats(1, 10**9), st.integers(1, 10**7))
def test_header_room_is_kept_for_one_sample_at_least_and_no_more_than_are_left(
    shard_bytes: int, mean: float, rows_left: int
) -> None:
    expected = samples_expected(
        shard_bytes=shard_bytes, mean_sample_bytes=mean, rows_left=rows_left
    )
    assert 1 <= expected <= rows_left


def test_names_sort_as_numbers_do() -> None:
    assert tensor_name(7, "aux") == "00000007.aux"
    assert tensor_name(123456789, "aux") == "123456789.aux"
    assert shard_name(3) == "shard-000003.safetensors"


def test_layers_are_named_in_both_conventions() -> None:
    metadata = shard_metadata(make_identity(boundaries=(2, 4, 5)))
    assert (metadata["boundaries"], metadata["layer_outputs"]) == ("2,4,5", "1,3,4")
    assert all(isinstance(value, str) for value in metadata.values())


def test_header_room_has_an_end_so_that_a_shard_of_tiny_samples_has_one_too() -> None:
    room = header_room(10**9, LAYOUT)
    assert room == MAX_ROOM_BYTES
    assert 30_000 < samples_that_fit(room, LAYOUT) < 40_000

"""Defines the layout of a shard file: a valid safetensors file of many samples. Pure.

| bytes | content |
|---|---|
| 0..8 | n, unsigned 64-bit little-endian: size of the header |
| 8..8+n | JSON header, padded with spaces to the room that was kept for it |
| 8+n.. | samples one after another, no holes; each is its tensors in the order below |

| tensor | shape | dtype | holds |
|---|---|---|---|
| `<prompt>.aux` | [N, k*H] | the model's | residual stream at the k boundaries, ascending |
| `<prompt>.last` | [N, H] | the model's | after the final norm (last kind `post`, `both`) |
| `<prompt>.last_pre` | [N, H] | the model's | h[n], before it (last kind `pre`, `both`) |
| `<prompt>.input_ids` | [N] | I32 | the prompt's tokens |
| `<prompt>.loss_mask` | [N] | I32 | 1 on tokens to be trained on, else 0 |

`<prompt>` is the row's ordinal in the input, eight digits or more. The mask is four bytes wide so
that every tensor stays aligned for readers that map the file.

The header comes first in the file but is written last, when the shard is sealed; room for it is
kept at the front. safetensors allows at most 100 MB of header, and trailing spaces in it
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import functools
import itertools
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import orjson
import xxhash

from extractor.core.errors import CorruptData, UsageError
from extractor.core.identity import Identity
from server_patch.dump_format import ITEM_BYTES, StateLayout

SHARD_FORMAT_VERSION = 1
#: Most bytes safetensors' own reader accepts as a header.
MAX_HEADER_BYTES = 100_000_000
#: A shard of ours is full when its header is: one of 100 MB takes a reader seconds and half a
#: gigabyte to parse, and us as much to write.
MAX_ROOM_BYTES = 16 << 20
_ROOM_STEP_BYTES = 4096
_BLOCK_BYTES = 1 << 20
_ENTRY_BYTES = 128  # of one tensor in the header: name, dtype, shape and two offsets of 4 TB
_METADATA_BYTES = 16384


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleTensor:
    """One tensor of a sample; `begin` and `end` are bytes from the sample's start."""

    name: str  # without the prompt
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def entry(self, sample_begin: int) -> dict[str, object]:
        """Its entry in the header of a shard whose data has the sample at `sample_begin`."""
        return {
            "dtype": self.dtype,
            "shape": list(self.shape),
            "data_offsets": [sample_begin + self.begin, sample_begin + self.end],
        }


def sample_tensors(num_tokens: int, layout: StateLayout) -> tuple[SampleTensor, ...]:
    """The tensors of a sample of `num_tokens` rows, in file order, without holes.

    Raises UsageError where a 2-byte dtype and an odd hidden size would leave tensors unaligned.
    """
    shapes: list[tuple[str, str, tuple[int, ...]]] = [
        (name, layout.dtype, (num_tokens, layout.state_width(name))) for name in layout.state_names
    ]
    shapes += [("input_ids", "I32", (num_tokens,)), ("loss_mask", "I32", (num_tokens,))]
    tensors: list[SampleTensor] = []
    begin = 0
    for name, dtype, shape in shapes:
        size = ITEM_BYTES[dtype]
        for extent in shape:
            size *= extent
        if size % 4:
            raise UsageError(f"hidden size {layout.hidden_size} is odd; shards need an even one")
        tensors.append(
            SampleTensor(name=name, dtype=dtype, shape=shape, begin=begin, end=begin + size)
        )
        begin += size
    return tuple(tensors)


def sample_bytes(num_tokens: int, layout: StateLayout) -> int:
    return num_tokens * _row_bytes(layout)  # there are no holes


@functools.cache
def _row_bytes(layout: StateLayout) -> int:
    return sample_tensors(1, layout)[-1].end


def tensor_name(ordinal: int, name: str) -> str:
    return f"{ordinal:08d}.{name}"


def header_room(num_samples: int, layout: StateLayout) -> int:
    """Bytes to keep at the front of a shard for the header of `num_samples` samples."""
    entry = _ENTRY_BYTES * (len(layout.state_names) + 2)
    steps = -(-(num_samples * entry + _METADATA_BYTES) // _ROOM_STEP_BYTES)
    return min(steps, MAX_ROOM_BYTES // _ROOM_STEP_BYTES) * _ROOM_STEP_BYTES


def samples_expected(*, shard_bytes: int, mean_sample_bytes: float, rows_left: int) -> int:
    """How many samples to keep header room for in a new shard.

    A quarter more than the mean size asks for, but no more than there are rows left; a shard whose
    header fills up first is sealed early.

    >>> samples_expected(shard_bytes=1000, mean_sample_bytes=10, rows_left=10**6)
    141
    >>> samples_expected(shard_bytes=1000, mean_sample_bytes=10, rows_left=3)
    3
    """
    by_size = 1.25 * shard_bytes / max(1.0, mean_sample_bytes) + 16
    return max(1, min(int(by_size), rows_left))


def samples_that_fit(room_bytes: int, layout: StateLayout) -> int:
    """How many samples' entries are sure to fit in a header of `room_bytes`."""
    return (room_bytes - _METADATA_BYTES) // (_ENTRY_BYTES * (len(layout.state_names) + 2))


def shard_metadata(identity: Identity) -> dict[str, str]:
    """The metadata in a shard's header; strings, as safetensors requires."""
    return {
        "format": "hidden-state-extractor",
        "format_version": str(SHARD_FORMAT_VERSION),
        "model": identity.model.path,
        "config_digest": identity.model.config_digest,
        "boundaries": ",".join(map(str, identity.boundaries)),
        "layer_outputs": ",".join(str(boundary - 1) for boundary in identity.boundaries),
        "num_layers": str(identity.model.num_layers),
        "hidden_size": str(identity.model.hidden_size),
        "dtype": identity.model.dtype,
        "last_kind": identity.last_kind,
    }


def encode_shard_header(
    samples: Iterable[tuple[int, int]],
    *,
    layout: StateLayout,
    metadata: Mapping[str, str],
    room_bytes: int,
) -> Iterator[bytes]:
    """The bytes before the data, exactly `room_bytes` in all, in blocks of about 1 MiB: all of
    them together, and as objects still more, would be what takes most memory in the whole client.

    `samples`: (ordinal, num_tokens) in file order. Raises CorruptData if they do not fit, which
    `samples_that_fit` rules out.
    """
    left = room_bytes
    block = bytearray()
    for part in itertools.chain(
        [struct.pack("<Q", room_bytes - 8), b'{"__metadata__":', orjson.dumps(dict(metadata))],
        _entries(samples, layout),
        [b"}"],
    ):
        left -= len(part)
        if left < 0:
            raise CorruptData(f"a shard header does not fit {room_bytes} bytes")
        block += part
        if len(block) >= _BLOCK_BYTES:
            yield bytes(block)
            block.clear()
    yield bytes(block)
    while left:
        padding = min(left, _BLOCK_BYTES)
        yield b" " * padding
        left -= padding


def _entries(samples: Iterable[tuple[int, int]], layout: StateLayout) -> Iterator[bytes]:
    offset = 0
    for ordinal, num_tokens in samples:
        tensors = sample_tensors(num_tokens, layout)
        for tensor in tensors:
            name = orjson.dumps(tensor_name(ordinal, tensor.name))
            yield b",%b:%b" % (name, orjson.dumps(tensor.entry(offset)))
        offset += tensors[-1].end


def shard_digest(header: xxhash.xxh3_128, sample_digests: Iterable[str]) -> str:
    """The digest of a sealed shard: xxh3-128 of its header's bytes and its samples' digests.

    `header`: the digest of the header's bytes. `sample_digests`: xxh3-128 in hex, in file order.
    Every byte of the file is in one of them, and none is read again for it.
    """
    digest = header.copy()
    for sample in sample_digests:
        digest.update(bytes.fromhex(sample))
    return str(digest.hexdigest())


def decode_shard_header(data: bytes) -> dict[str, dict[str, object]]:
    """Name -> entry of a sealed shard's header; `data` begins at the file's start.

    Raises CorruptData.
    """
    if len(data) < 8:
        raise CorruptData("too short for a header")
    (length,) = struct.unpack_from("<Q", data)
    if length > MAX_HEADER_BYTES or len(data) < 8 + length:
        raise CorruptData(f"header claims {length} bytes, {len(data)} are there")
    try:
        document = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise CorruptData(f"unreadable header: {error!r}") from error
    if not isinstance(document, dict):
        raise CorruptData("header is not an object")
    return document

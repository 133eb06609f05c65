"""A fingerprint of the weights in memory: every byte of every parameter and buffer.

Left out are buffers that belong to no checkpoint (torch's non-persistent ones): tables that the
engine computes from the config, such as rotary embeddings. Another release of torch may round them
in another way, and they may grow while the server runs.

It is computed where the tensors are, in integer arithmetic only, so equal bytes give equal values
on every device. It detects accidents, such as a checkpoint that was replaced under the same path;
it is not a defence against somebody who forges weights.

Each tensor is read once, as 32-bit words, in chunks of `LANES` words. Word i of each chunk goes
into lane i, a polynomial modulo 2^64:

    lane[i] = word[i] + FACTOR * lane[i]

The lanes are then summed twice, each time with other fixed odd pseudo-random factors, which gives
128 bits for each tensor. Two words differ by less than 2^32, and odd numbers have inverses modulo
2^64, so a change of one word always shows; several cancel out with a probability of about 2^-60.
The fingerprint is a hash of the name, dtype, shape, strides and these bits of all tensors.

Besides the weights, this takes 50 MB on each device while it runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

#: Changes with what is computed: fingerprints of two versions are not comparable.
VERSION: Final = 1
#: Words of one chunk. At this size the lanes stay in a GPU's cache, and a chunk takes longer than
#: the launch of its kernel.
LANES: Final = 1 << 21
_WORD_BYTES: Final = 4
_CHUNK_BYTES: Final = LANES * _WORD_BYTES
#: Words that the CPU works on at a time. They stay in its cache, and torch uses one thread for so
#: few: on a busy machine a team of threads is far slower than one.
_CPU_STEP: Final = 1 << 15
_FACTOR: Final = 0x9E3779B97F4A7C15 - (1 << 64)  # odd; as a signed number, which torch needs


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """The weights of one rank, or of all ranks."""

    layout: str  # digest of name, dtype, shape and strides of every tensor
    content: str  # digest of that and of every byte


def fingerprint(model: torch.nn.Module) -> Fingerprint:
    """Raises what torch raises for a tensor that cannot be read as bytes."""
    layout: list[Any] = [VERSION]
    hashed: list[torch.Tensor] = []
    first_names: dict[tuple[object, ...], str] = {}
    with torch.inference_mode():
        leaves = [leaf for name, tensor in _named_tensors(model) for leaf in _leaves(name, tensor)]
        for name, tensor in sorted(leaves, key=lambda leaf: leaf[0]):
            tied_to = first_names.setdefault(_identity(tensor), name)
            strides = None if tensor.is_contiguous() else tensor.stride()
            layout.append([name, str(tensor.dtype), list(tensor.shape), strides, tied_to])
            if tied_to == name and not tensor.is_meta:
                hashed.append(tensor.detach())
        values = _hash_tensors(hashed)
    described = json.dumps(layout).encode()
    content = hashlib.sha256(described)
    for value in values:
        content.update(value.to_bytes(8, "little", signed=True))
    return Fingerprint(
        layout=hashlib.sha256(described).hexdigest(), content=content.hexdigest()[:32]
    )


def combine(ranks: Sequence[Fingerprint]) -> Fingerprint:
    """The fingerprint of a model whose tensors are spread over `ranks`, in their order."""
    layout = hashlib.sha256("\n".join(rank.layout for rank in ranks).encode())
    content = hashlib.sha256("\n".join(rank.content for rank in ranks).encode())
    return Fingerprint(layout=layout.hexdigest(), content=content.hexdigest()[:32])


def _hash_tensors(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Two 64-bit numbers for each tensor. Waits for the devices."""
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(index)
    values = [0] * (2 * len(tensors))
    for device, indices in by_device.items():
        lanes = _Lanes(device, most_bytes=max(tensors[index].nbytes for index in indices))
        for index, pair in zip(
            indices, lanes.hash_all([tensors[index] for index in indices]), strict=True
        ):
            values[2 * index : 2 * index + 2] = pair
    return values


class _Lanes:
    """The working memory on one device."""

    def __init__(self, device: torch.device, *, most_bytes: int) -> None:
        """most_bytes: size of the largest tensor."""
        count = min(LANES, -(-most_bytes // _WORD_BYTES))
        self._step = _CPU_STEP if device.type == "cpu" else LANES
        self._device = device
        self._lanes = torch.empty(count, dtype=torch.int64, device=device)
        self._factors = _factors(count + 1).to(device)
        self._products = torch.empty(min(self._step, count), dtype=torch.int64, device=device)

    def hash_all(self, tensors: Sequence[torch.Tensor]) -> list[list[int]]:
        results = torch.zeros((len(tensors), 2), dtype=torch.int64, device=self._device)
        for tensor, result in zip(tensors, results, strict=True):
            self._sum(self._fill(tensor), result)
        return [[int(value) for value in pair] for pair in results.tolist()]

    def _fill(self, tensor: torch.Tensor) -> int:
        """Take in every word of `tensor`; the number of lanes used."""
        used = 0
        for chunk in _chunks(tensor):
            words = _as_words(chunk)
            count = words.numel()
            if count > used:  # these lanes still hold another tensor
                self._lanes[used:count].zero_()
                used = count
            for part, lanes in zip(
                words.split(self._step), self._lanes[:count].split(self._step), strict=True
            ):
                torch.add(part, lanes, alpha=_FACTOR, out=lanes)
        return used

    def _sum(self, used: int, result: torch.Tensor) -> None:
        """Add up the lanes in use twice, each with factors of its own."""
        for number in range(2):
            factors = self._factors[number : number + used]
            for lanes, by in zip(
                self._lanes[:used].split(self._step), factors.split(self._step), strict=True
            ):
                products = self._products[: lanes.numel()]
                torch.mul(lanes, by, out=products)
                result[number] += products.sum()


def _factors(count: int) -> torch.Tensor:
    """The first `count` of a fixed sequence of odd 64-bit numbers."""
    noise = bytearray(hashlib.shake_128(b"hidden states: weights").digest(8 * count))
    return torch.frombuffer(noise, dtype=torch.int64).bitwise_or_(1)


def _named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules():
        computed = module._non_persistent_buffers_set
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and name not in computed:
                yield f"{path}.{name}" if path else name, tensor


def _leaves(name: str, tensor: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors in `tensor`, which a quantized one is made of."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield name, tensor
        return
    for attribute in flatten()[0]:
        yield from _leaves(f"{name}.{attribute}", getattr(tensor, attribute))


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for two tensors that are the same memory, read alike."""
    if tensor.numel() == 0 or tensor.is_meta:
        return (object(),)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The bytes of `tensor`, at most `_CHUNK_BYTES` at a time; a copy only where it has holes.

    In the order of memory, in which a transposed weight is read as fast as any other.
    """
    if tensor.numel() == 0:
        return
    strides = tensor.stride()
    ordered = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
    if ordered.is_contiguous():
        yield from ordered.view(-1).view(torch.uint8).split(_CHUNK_BYTES)
        return
    row_bytes = ordered[0].numel() * ordered.element_size()
    if row_bytes > _CHUNK_BYTES:
        for row in ordered:
            yield from _chunks(row)
        return
    for rows in ordered.split(_CHUNK_BYTES // row_bytes):
        yield rows.contiguous().view(-1).view(torch.uint8)


def _as_words(chunk: torch.Tensor) -> torch.Tensor:
    """`chunk` as 32-bit words, filled up with zeros; copied only if it does not lie on words."""
    missing = -chunk.numel() % _WORD_BYTES
    if missing or chunk.storage_offset() % _WORD_BYTES:
        chunk = torch.cat([chunk, chunk.new_zeros(missing)])
    return chunk.view(torch.int32)

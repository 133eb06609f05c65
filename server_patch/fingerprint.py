"""A fingerprint of the weights in memory: every byte of every parameter and buffer.

Buffers that do not belong to a checkpoint (torch's non-persistent buffers) are left out. They are
tables that the engine computes from the config, such as rotary embeddings: another torch release
may round them differently, and they may grow while the server runs.

The fingerprint is computed on the device that holds the tensors, in integer arithmetic only, so
equal bytes give equal values on every device. It detects accidents, such as a checkpoint that was
replaced under the same path; it does not protect against forged weights.

Each tensor is read once, as 32-bit words, in chunks of `LANES` words. Word i of each chunk goes
into lane i, a polynomial modulo 2^64:

    lane[i] = word[i] + FACTOR * lane[i]

The lanes are then summed twice, each time with different fixed odd pseudo-random factors, which
gives 128 bits for each tensor. Two words differ by less than 2^32, and odd numbers have inverses
modulo 2^64, so a change of one word is always detected; several changes cancel out with a
probability of about 2^-60. The fingerprint is a hash of the name, dtype, shape, strides and these
bits of all tensors.

The computation needs 50 MB of extra memory on each device.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

#: Version of the algorithm: fingerprints of different versions are not comparable.
VERSION: Final = 1
#: Words in one chunk. At this size the lanes fit a GPU's cache, and processing a chunk takes longer
#: than launching its kernel.
LANES: Final = 1 << 21
_WORD_BYTES: Final = 4
_CHUNK_BYTES: Final = LANES * _WORD_BYTES
#: Words that the CPU processes at a time. They fit its cache, and torch uses a single thread for
#: them: on a busy machine several threads are far slower than one.
_CPU_STEP: Final = 1 << 15
_FACTOR: Final = 0x9E3779B97F4A7C15 - (1 << 64)  # odd; signed, as torch requires


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """The fingerprint of one rank's weights, or of all ranks' weights."""

    layout: str  # digest of name, dtype, shape and strides of every tensor
    content: str  # digest of the layout and of every byte


def fingerprint(model: torch.nn.Module) -> Fingerprint:
    """Compute the fingerprint of a model's tensors on this rank.

    Raises torch's error for a tensor that cannot be read as bytes.
    """
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
    """Combine the fingerprints of all ranks, in rank order, into that of the whole model."""
    layout = hashlib.sha256("\n".join(rank.layout for rank in ranks).encode())
    content = hashlib.sha256("\n".join(rank.content for rank in ranks).encode())
    return Fingerprint(layout=layout.hexdigest(), content=content.hexdigest()[:32])


def _hash_tensors(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Hash each tensor to two 64-bit numbers. Blocks until the devices are done."""
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
    """The lanes and other working memory on one device."""

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
        """Feed every word of `tensor` into the lanes; return the number of lanes used."""
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
        """Sum the first `used` lanes twice, each time with different factors."""
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
    """The plain tensors of `tensor`; a quantized one consists of several."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield name, tensor
        return
    for attribute in flatten()[0]:
        yield from _leaves(f"{name}.{attribute}", getattr(tensor, attribute))


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """A value that is equal for two tensors with the same memory, dtype, shape and strides."""
    if tensor.numel() == 0 or tensor.is_meta:
        return (object(),)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The bytes of `tensor` in memory order, at most `_CHUNK_BYTES` at a time.

    Memory order keeps a transposed weight as fast to read as any other. Only a tensor with gaps is
    copied.
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
    """`chunk` as 32-bit words, padded with zeros; copied only if it needs padding or alignment."""
    missing = -chunk.numel() % _WORD_BYTES
    if missing or chunk.storage_offset() % _WORD_BYTES:
        chunk = torch.cat([chunk, chunk.new_zeros(missing)])
    return chunk.view(torch.int32)

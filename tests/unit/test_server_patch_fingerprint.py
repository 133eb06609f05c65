"""The fingerprint of the weights: equal for equal bytes, different for any change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from server_patch import fingerprint as module
from server_patch.fingerprint import Fingerprint, combine, fingerprint

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
]


def model_of(**tensors: torch.Tensor) -> torch.nn.Module:
    model = torch.nn.Module()
    for name, tensor in tensors.items():
        model.register_buffer(name, tensor)
    return model


def of(**tensors: torch.Tensor) -> Fingerprint:
    return fingerprint(model_of(**tensors))


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


@pytest.fixture
def few_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink the sizes so that small tensors need several chunks, and a chunk several steps."""
    monkeypatch.setattr(module, "LANES", 8)
    monkeypatch.setattr(module, "_CHUNK_BYTES", 32)
    monkeypatch.setattr(module, "_CPU_STEP", 3)


def test_the_value_is_the_same_in_every_process_and_on_every_device() -> None:
    """Data sets store it: a change of the algorithm requires a new VERSION."""
    found = of(a=torch.arange(1000, dtype=torch.int16), b=torch.arange(7, dtype=torch.uint8))
    assert found == Fingerprint(
        layout="4829d54ed6e4bdce8cdc44595740b78628a5a2d81f4a8c1ccf00e3bb0cf75cad",
        content="1e75983afbc36bdc80f1a8e1c4da1139",
    )
    assert found == of(b=torch.arange(7, dtype=torch.uint8), a=torch.arange(1000).short())


@pytest.mark.usefixtures("few_lanes")
@pytest.mark.parametrize("size", [1, 3, 4, 8, 31, 32, 33, 97])
def test_every_bit_counts(size: int) -> None:
    """Includes the last bytes if they do not fill a word."""
    data = random_bytes(size)
    seen = {of(w=data).content}
    for index in range(size):
        for bit in range(8):
            changed = data.clone()
            changed[index] ^= 1 << bit
            seen.add(of(w=changed).content)
    assert len(seen) == 8 * size + 1


@pytest.mark.usefixtures("few_lanes")
def test_order_counts() -> None:
    """Swapped rows, words, bytes, chunks and whole tensors change the value."""
    data = random_bytes(160)
    other = random_bytes(160, seed=1)
    rows = data.view(10, 16)
    variants = [
        of(a=data, b=other),
        of(a=other, b=data),
        of(a=rows.flip(0).contiguous().view(-1), b=other),
        of(a=rows[:, list(range(8, 16)) + list(range(8))].contiguous().view(-1), b=other),
        of(a=data.view(5, 32)[[1, 0, 2, 3, 4]].contiguous().view(-1), b=other),
        of(a=data.view(-1, 2).flip(1).contiguous().view(-1), b=other),
    ]
    assert len({variant.content for variant in variants}) == len(variants)
    assert len({variant.layout for variant in variants}) == 1


@pytest.mark.usefixtures("few_lanes")
def test_two_flipped_signs_in_one_lane_do_not_cancel_out() -> None:
    """Two equal changes could cancel out only in the top bit of a sum."""
    data = torch.ones(32, dtype=torch.float32)
    seen = {of(w=data).content}
    for first in range(32):
        for second in range(first + 1, 32):
            changed = data.clone()
            changed[[first, second]] *= -1
            seen.add(of(w=changed).content)
    assert len(seen) == 1 + 32 * 31 // 2


def test_name_dtype_and_shape_count() -> None:
    data = torch.zeros(24, dtype=torch.uint8)
    variants = [
        of(w=data),
        of(v=data),
        of(w=data.view(torch.int8)),
        of(w=data.view(4, 6)),
        of(w=data.view(6, 4)),
        of(w=data, v=torch.empty(0)),
        of(w=data, v=torch.empty(0, 3)),
        of(w=torch.zeros(25, dtype=torch.uint8)),
    ]
    assert len({variant.content for variant in variants}) == len(variants)
    assert len({variant.layout for variant in variants}) == len(variants)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_dtype(dtype: torch.dtype) -> None:
    data = random_bytes(64) & 1
    value = of(w=data.view(dtype))
    assert value == of(w=data.clone().view(dtype))
    data[17] ^= 1
    assert of(w=data.view(dtype)).content != value.content
    assert of(w=torch.zeros((), dtype=dtype)).content  # a scalar


@pytest.mark.usefixtures("few_lanes")
@pytest.mark.parametrize(
    "view",
    [
        lambda base: base.t(),
        lambda base: base[:, ::2],
        lambda base: base[1:, 3:],
        lambda base: base[:, :1],
        lambda base: base.view(4, 10, 20).permute(2, 0, 1),
        lambda base: base[0].expand(3, 20),
        lambda base: base.view(-1)[1:],  # not aligned to words
        lambda base: base.view(-1)[::7],
    ],
)
def test_a_view_has_the_fingerprint_of_its_own_elements(
    view: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    base = random_bytes(800).view(40, 20)
    shown = set(view(torch.arange(800).view(40, 20)).flatten().tolist())
    value = of(w=view(base))
    hidden = base.clone()
    for index in range(800):
        changed = base.clone()
        changed.view(-1)[index] ^= 4
        if index in shown:
            assert of(w=view(changed)).content != value.content
        else:
            hidden.view(-1)[index] ^= 4
    assert of(w=view(hidden)) == value


def test_tied_weights_are_read_once_and_differ_from_equal_ones() -> None:
    data = random_bytes(64)
    tied, equal = of(a=data, b=data), of(a=data, b=data.clone())
    assert tied.layout != equal.layout
    assert of(a=data, b=data.view(8, 8)).layout not in (tied.layout, equal.layout)


def test_parameters_count_with_and_without_gradients() -> None:
    model = torch.nn.Linear(4, 4)
    value = fingerprint(model)
    model.requires_grad_(False)
    assert fingerprint(model) == value
    with torch.no_grad():
        model.bias[3] += 1
    assert fingerprint(model).content != value.content


def test_a_quantized_tensor_is_read_as_its_parts() -> None:
    class Quantized:
        def __init__(self, values: torch.Tensor, scale: torch.Tensor) -> None:
            self.values, self.scale = values, scale

        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["values", "scale"], None

    parts = list(module._leaves("w", Quantized(torch.ones(2), torch.zeros(1))))
    assert [name for name, _ in parts] == ["w.values", "w.scale"]


def test_a_model_without_tensors_has_a_fingerprint() -> None:
    assert fingerprint(torch.nn.Module()).content
    assert of(w=torch.empty(3, device="meta")).content


class Allocations(TorchDispatchMode):
    """Records the sizes of tensors that operators allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            part.untyped_storage().data_ptr()
            for part in tree_leaves((args, kwargs))
            if isinstance(part, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for part in tree_leaves(result):
            if isinstance(part, torch.Tensor) and part.untyped_storage().data_ptr() not in given:
                self.sizes.append(part.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize(
    "view",
    [
        lambda base: base,
        lambda base: base.t(),
        lambda base: base[:, ::3],
        lambda base: base[:, 1:],
        lambda base: base[:, :-1].t(),
        lambda base: base.view(-1)[1:],
        lambda base: base.view(-1)[:-1],
    ],
)
def test_memory_is_bounded(
    view: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor is never copied as a whole, whatever its size and memory layout."""
    lanes = 1 << 12
    monkeypatch.setattr(module, "LANES", lanes)
    monkeypatch.setattr(module, "_CHUNK_BYTES", 4 * lanes)
    data = torch.zeros(60, lanes, dtype=torch.int8)
    with Allocations() as allocations:
        value = of(w=view(data))
    assert 8 * lanes <= max(allocations.sizes) <= 8 * (lanes + 1)
    data[30, 3] = 2
    assert of(w=view(data)).content != value.content


def test_ranks_are_combined_in_their_order() -> None:
    a, b = of(w=torch.zeros(3)), of(w=torch.ones(3))
    assert combine([a, b]) != combine([b, a])
    assert combine([a, a]).layout == combine([a, b]).layout
    assert combine([a]) != combine([a, a])
    assert len(combine([a]).content) == 32

"""The way from a CUDA device to the ring: the forward thread waits for nothing, and what the engine
does to its tensors afterwards changes nothing.

Run by hand on a machine with a GPU: `pytest tests/gpu`.
"""

from __future__ import annotations

import pytest
import torch

from server_patch.dump_format import StateLayout
from server_patch.ring import Ring, plan_ring
from server_patch.slot_layout import SlotLayout
from server_patch.staging import CudaStager, States

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

ROWS, HIDDEN = 512, 256
LAYOUT = SlotLayout(
    StateLayout(boundaries=(1, 2, 3), hidden_size=HIDDEN, dtype="BF16", last_kind="post")
)
#: Of the device's clock: some tenths of a second of work, ahead of what is looked at.
BUSY_CYCLES = 500_000_000


@pytest.fixture(scope="module")
def ring() -> Ring:
    """One for all tests, as a process has one for its life: pinned memory is never given back."""
    plan = plan_ring(layout=LAYOUT, forward_rows=ROWS, num_slots=2, total_bytes=None, pinned=True)
    return Ring(plan, pinned=True)


def make_states(device: torch.device) -> States:
    generator = torch.Generator(device=device).manual_seed(0)

    def state() -> torch.Tensor:
        return torch.randn(ROWS, HIDDEN, generator=generator, device=device, dtype=torch.bfloat16)

    ids = torch.arange(ROWS, device=device)
    return States(aux=[state() for _ in range(3)], last=state(), last_pre=None, input_ids=ids)


@pytest.mark.parametrize("kind", ["list", "packed"])
def test_staging_waits_for_nothing_and_keeps_the_rows_of_its_moment(kind: str, ring: Ring) -> None:
    device = torch.device("cuda", 0)
    stager = CudaStager(device)
    states = make_states(device)
    parts = states.aux
    packed = torch.cat(parts, dim=1)
    if kind == "packed":
        parts = [packed]
        states = States(aux=packed, last=states.last, last_pre=None, input_ids=states.input_ids)
    truth = [packed.cpu(), states.last.cpu(), states.input_ids.int().cpu()]
    slot = ring.take()
    assert slot is not None
    # The first use of each kernel loads it, which may synchronise.
    stager.stage(states, LAYOUT, slot, begin=0, end=ROWS)
    stager.wait(slot)
    slot.tensor.zero_()
    torch.cuda.synchronize()

    torch.cuda._sleep(BUSY_CYCLES)
    busy = torch.cuda.Event()
    busy.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        stager.stage(states, LAYOUT, slot, begin=0, end=ROWS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not busy.query()  # the device is still at what came before
    for tensor in (*parts, states.last):
        tensor.zero_()  # as the engine's next forward would
    stager.wait(slot)

    for section, tensor in zip(LAYOUT.sections(ROWS), truth, strict=True):
        part = slot.tensor[section.offset : section.offset + ROWS * section.row_bytes]
        assert torch.equal(part.view(tensor.dtype).view(tensor.shape), tensor), section.name
    ring.release(slot)

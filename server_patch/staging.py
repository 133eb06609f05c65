"""Copies the tensors of a forward to a staging slot, without stopping the forward thread.

Both stagers first gather the wanted rows in the slot's layout. On a CPU that is the copy. On a GPU
the gathering runs on the compute stream into memory of our own, in order with the model's kernels,
so whatever the engine overwrites afterwards (in-place norms, communication buffers, the next
forward) cannot reach it; the copy to the host then runs on a stream of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from server_patch.ring import RingSlot
from server_patch.slot_layout import SlotLayout

TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "I32": torch.int32,
}


class StagingError(RuntimeError):
    """The engine's tensors do not have the expected shape or dtype."""


@dataclass(frozen=True, kw_only=True)
class States:
    """The states of one forward. All tensors have the same number of rows T, padding included."""

    aux: Any  # [T, k*H], or a list of k tensors [T, H], in ascending boundary order
    last: torch.Tensor  # [T, H], after the final norm
    last_pre: torch.Tensor | None  # [T, H], before it; None unless asked for
    input_ids: torch.Tensor  # [T]

    def check(self, layout: SlotLayout) -> None:
        """Raises StagingError unless every tensor has the shape and the dtype of `layout`: a copy
        into another dtype would round silently."""
        expected = layout.states
        num_boundaries = len(expected.boundaries)
        rows, hidden = self.last.shape[0], expected.hidden_size
        wanted = {"last": (self.last, hidden)}
        if isinstance(self.aux, torch.Tensor):
            wanted["aux"] = (self.aux, num_boundaries * hidden)
        else:
            if len(self.aux) != num_boundaries:
                raise StagingError(
                    f"{num_boundaries} boundaries are armed, {len(self.aux)} were captured"
                )
            wanted.update({f"aux[{i}]": (part, hidden) for i, part in enumerate(self.aux)})
        if expected.last_kind in ("pre", "both"):
            if self.last_pre is None:
                raise StagingError("the final norm did not show its input")
            wanted["last_pre"] = (self.last_pre, hidden)
        for name, (tensor, width) in wanted.items():
            if tuple(tensor.shape) != (rows, width):
                raise StagingError(f"{name} is {list(tensor.shape)}, must be {[rows, width]}")
            if tensor.dtype != TORCH_DTYPES[expected.dtype]:
                raise StagingError(
                    f"{name} is {tensor.dtype}, the model's states are {expected.dtype}"
                )
        if self.input_ids.dim() != 1 or self.input_ids.shape[0] < rows:
            raise StagingError(f"input_ids is {list(self.input_ids.shape)}, must be [>= {rows}]")


def gather(states: States, layout: SlotLayout, flat: torch.Tensor, *, begin: int, end: int) -> None:
    """Copy rows begin..end of every tensor to `flat` (uint8, same device), as `layout` says."""
    rows = end - begin
    for section in layout.sections(rows):
        part = flat[section.offset : section.offset + rows * section.row_bytes]
        target = part.view(TORCH_DTYPES[section.dtype]).view(rows, section.width)
        if section.name == "aux" and not isinstance(states.aux, torch.Tensor):
            torch.cat([tensor[begin:end] for tensor in states.aux], dim=1, out=target)
        elif section.name == "input_ids":
            target.copy_(states.input_ids[begin:end].unsqueeze(1))
        else:
            target.copy_(getattr(states, section.name)[begin:end])


class CpuStager:
    """Copies states that are in host memory; the copy is complete when `stage` returns."""

    pinned = False  # whether the ring's memory must be

    def stage(
        self, states: States, layout: SlotLayout, slot: RingSlot, *, begin: int, end: int
    ) -> None:
        """Begin to fill `slot` with rows begin..end. Never waits for the device."""
        gather(states, layout, slot.tensor, begin=begin, end=end)

    def wait(self, slot: RingSlot) -> None:
        """Fill `slot` and return when that is done; called once, by another thread."""

    def enter_thread(self) -> None:
        """Called once by the thread that waits, before anything else."""


class CudaStager:
    """Gathers states on a GPU's compute stream, and copies them on a stream of its own.

    The copy is driven by the thread that waits for it, not by the forward thread.
    """

    pinned = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copy_stream = torch.cuda.Stream(device=device)

    def stage(
        self, states: States, layout: SlotLayout, slot: RingSlot, *, begin: int, end: int
    ) -> None:
        packed = torch.empty(layout.size_bytes(end - begin), dtype=torch.uint8, device=self._device)
        gather(states, layout, packed, begin=begin, end=end)
        gathered = torch.cuda.Event()
        gathered.record(torch.cuda.current_stream(self._device))
        slot.source = (packed, gathered)

    def wait(self, slot: RingSlot) -> None:
        packed, gathered = slot.source
        with torch.cuda.stream(self._copy_stream):
            self._copy_stream.wait_event(gathered)
            slot.tensor[: packed.nbytes].copy_(packed, non_blocking=True)
            # Blocking: the waiting thread sleeps instead of spinning on a core.
            copied = torch.cuda.Event(blocking=True)
            copied.record(self._copy_stream)
        copied.synchronize()
        # Only now may the allocator hand the memory out again.
        slot.source = None

    def enter_thread(self) -> None:
        # A fresh thread would otherwise touch device 0, and open a context there.
        torch.cuda.set_device(self._device)


#: Fills slots with the rows of a forward.
Stager = CpuStager | CudaStager


def make_stager(device: torch.device) -> Stager:
    """The stager for states on `device`."""
    return CudaStager(device) if device.type == "cuda" else CpuStager()

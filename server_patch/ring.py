"""The staging memory between the device and the files: a bounded number of equal slots.

A slot is taken by the forward thread, filled by one copy, and given back when the last file made
from it is written. When none is free the forward thread waits: back-pressure, never a drop.
"""

from __future__ import annotations

import mmap
import os
import threading
from dataclasses import dataclass
from typing import Any, Final

import torch

from server_patch.slot_layout import SLOT_ALIGNMENT, SlotLayout
from server_patch.writer_protocol import RingMap

#: Maximum staging memory by default.
MAX_PINNED_BYTES: Final = 4 << 30
MAX_PLAIN_BYTES: Final = 256 << 20


class RingError(RuntimeError):
    """The ring cannot be allocated as configured."""


@dataclass(frozen=True, kw_only=True)
class RingPlan:
    """Sizes of a ring."""

    num_slots: int
    slot_rows: int  # tokens that fit in one slot
    slot_bytes: int
    total_bytes: int


def plan_ring(
    *, layout: SlotLayout, forward_rows: int, num_slots: int, total_bytes: int | None, pinned: bool
) -> RingPlan:
    """Sizes for forwards of up to `forward_rows` tokens.

    total_bytes: the user's limit; None means `num_slots` whole forwards, capped by device.
    A slot that cannot hold a whole forward is legal: such a forward is split over several.
    Raises RingError when not even one row fits.
    """
    whole = layout.size_bytes(forward_rows)
    whole += -whole % SLOT_ALIGNMENT
    if total_bytes is None:
        total_bytes = min(num_slots * whole, MAX_PINNED_BYTES if pinned else MAX_PLAIN_BYTES)
    num_slots = max(num_slots, total_bytes // whole)
    slot_bytes = min(whole, total_bytes // num_slots // SLOT_ALIGNMENT * SLOT_ALIGNMENT)
    slot_rows = forward_rows if slot_bytes == whole else layout.rows_in(slot_bytes)
    if slot_rows < 1:
        raise RingError(
            f"a ring of {total_bytes} bytes in {num_slots} slots holds no row of "
            f"{layout.bytes_per_row} bytes: raise SGLANG_HS_RING_BYTES"
        )
    return RingPlan(
        num_slots=num_slots, slot_rows=slot_rows, slot_bytes=slot_bytes, total_bytes=total_bytes
    )


class RingSlot:
    """One part of the ring, owned by its taker until all its uses are over."""

    def __init__(self, tensor: torch.Tensor, index: int) -> None:
        self.tensor = tensor  # [slot_bytes] uint8, host
        self.index = index  # it begins at byte index * slot_bytes of the ring
        # Where its content still is, between staging and copying: the stager's own business.
        self.source: Any = None
        self.uses = 0  # calls of `Ring.release` after which it is free


class Ring:
    """Allocates the slots, hands them out and takes them back."""

    def __init__(self, plan: RingPlan, *, pinned: bool) -> None:
        """pinned: lock the memory for the GPU's copies. Raises RingError when that fails."""
        self.plan = plan
        # A file without a name, which the writer processes map too. One allocation, kept for the
        # life of the process: pinning is slow.
        self.descriptor = os.memfd_create("hidden-states-ring", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, plan.total_bytes)
        memory = torch.frombuffer(mmap.mmap(self.descriptor, plan.total_bytes), dtype=torch.uint8)
        # Touched at once, so that the first forwards do not pay for page faults.
        memory.zero_()
        if pinned:
            _pin(memory)
        size = plan.slot_bytes
        self._free = [
            RingSlot(memory[index * size : (index + 1) * size], index)
            for index in reversed(range(plan.num_slots))
        ]
        self._lock = threading.Lock()
        self._peak_slots = 0

    @property
    def map(self) -> RingMap:
        """The ring, for a writer process."""
        return RingMap(
            descriptor=self.descriptor,
            total_bytes=self.plan.total_bytes,
            slot_bytes=self.plan.slot_bytes,
        )

    @property
    def peak_bytes(self) -> int:
        """Peak memory in use, in bytes."""
        return self._peak_slots * self.plan.slot_bytes

    def take(self) -> RingSlot | None:
        """A free slot, if there is one."""
        with self._lock:
            if not self._free:
                return None
            slot = self._free.pop()
            slot.uses = 1
            self._peak_slots = max(self._peak_slots, self.plan.num_slots - len(self._free))
            return slot

    def release(self, slot: RingSlot) -> None:
        """One use of the slot is over."""
        with self._lock:
            slot.uses -= 1
            if slot.uses <= 0:
                slot.source = None
                self._free.append(slot)


def _pin(memory: torch.Tensor) -> None:
    """Register host memory with the device, so that copies to it run by themselves."""
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(error) != 0:
        raise RingError(
            f"{memory.nbytes} bytes of host memory cannot be pinned (CUDA error {int(error)}): "
            "lower SGLANG_HS_RING_BYTES, or raise the limit of locked memory"
        )

"""Everything a writing rank runs besides the capture, put together: ring, copies, writers, tap."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from server_patch import ready
from server_patch.dump_dir import Home
from server_patch.dump_format import READY_NAME
from server_patch.ring import Ring, RingPlan, plan_ring
from server_patch.settings import Settings
from server_patch.sglang_api import Facts
from server_patch.slot_layout import Layout
from server_patch.staging import make_stager
from server_patch.stats import Stats
from server_patch.tap import Tap
from server_patch.weights import Weights
from server_patch.writer_pool import WriterPool
from server_patch.writer_protocol import Assignment

#: One process fills about 2.4 GB/s of fresh memory pages; a GPU can ask for more than that.
_WRITERS_CUDA: Final = 4
_WRITERS_CPU: Final = 1


@dataclass(frozen=True, kw_only=True)
class Writing:
    """The running parts that the rest of the plugin has to do with."""

    settings: Settings
    facts: Facts
    home: Home
    boundaries: tuple[int, ...]
    weights: Weights
    tap: Tap
    ring_plan: RingPlan
    num_writers: int

    def tell_ready(self, *, architecture: str, capture_method: str, config_digest: str) -> None:
        """Write READY.json, and rewrite it whenever the weights change. Raises OSError."""
        document = ready.make_ready(
            facts=self.facts,
            boot_id=self.home.boot_id,
            rank=self.home.rank,
            architecture=architecture,
            config_digest=config_digest,
            boundaries=self.boundaries,
            capture_method=capture_method,
            last_kind=self.settings.last_kind,
            rid_prefix=self.settings.rid_prefix,
            ring_bytes=self.ring_plan.total_bytes,
            num_writers=self.num_writers,
        )

        def write() -> None:
            current = replace(document, weights=self.weights.info)
            ready.tell_ready(self.home.directory, current, file_mode=self.home.file_mode)

        def write_again() -> None:
            # READY.json is removed when the capture turns out to be wrong, and must stay removed.
            if (self.home.directory / READY_NAME).exists():
                write()

        write()
        self.weights.watch(write_again)


def start_writing(
    *,
    settings: Settings,
    facts: Facts,
    home: Home,
    boundaries: tuple[int, ...],
    weights: Weights,
) -> Writing:
    """Allocate the ring and start the writer processes.

    Raises RingError, WriterError, or what the device says to the allocation.
    """
    layout = Layout(
        num_boundaries=len(boundaries),
        hidden_size=facts.hidden_size,
        dtype=facts.dtype,
        last_kind=settings.last_kind,
    )
    stager = make_stager(facts.device)
    plan = plan_ring(
        layout=layout,
        forward_rows=facts.max_forward_rows,
        num_slots=settings.ring_slots,
        total_bytes=settings.ring_bytes,
        pinned=stager.pinned,
    )
    ring = Ring(plan, pinned=stager.pinned)
    stats = Stats()
    num_writers = settings.num_writers or (_WRITERS_CUDA if stager.pinned else _WRITERS_CPU)

    def assignment(socket_descriptor: int) -> Assignment:
        return Assignment(
            directory=str(home.directory),
            file_mode=home.file_mode,
            layout=layout,
            boundaries=boundaries,
            boot_id=home.boot_id,
            rank=home.rank,
            slot_bytes=plan.slot_bytes,
            ring_bytes=plan.total_bytes,
            ring_descriptor=ring.descriptor,
            socket_descriptor=socket_descriptor,
        )

    writers = WriterPool(
        assignment=assignment,
        directory=home.directory,
        file_mode=home.file_mode,
        num_writers=num_writers,
        ring=ring,
        stager=stager,
        stats=stats,
    )
    writers.start()
    tap = Tap(
        rid_prefix=settings.rid_prefix,
        layout=layout,
        ring=ring,
        stager=stager,
        writers=writers,
        stats=stats,
        weights=weights,
    )
    return Writing(
        settings=settings,
        facts=facts,
        home=home,
        boundaries=boundaries,
        weights=weights,
        tap=tap,
        ring_plan=plan,
        num_writers=num_writers,
    )

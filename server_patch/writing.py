"""The parts of a writing rank behind the capture: ring, copies, writer processes, tap."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from server_patch.dump_dir import RankDir
from server_patch.dump_format import READY_NAME, CaptureInfo, Ready, StateLayout
from server_patch.ready import own_process, plugin_version, write_ready
from server_patch.ring import Ring, plan_ring
from server_patch.settings import Settings
from server_patch.sglang_api import RunnerFacts
from server_patch.slot_layout import SlotLayout
from server_patch.staging import make_stager
from server_patch.stats import Stats
from server_patch.tap import Tap
from server_patch.weights import Weights
from server_patch.writer_pool import WriterPool
from server_patch.writer_protocol import Assignment
from server_patch.writer_supervisor import WriterSupervisor

#: One process fills about 2.4 GB/s of fresh memory pages; a GPU can ask for more than that.
_WRITERS_CUDA: Final = 4
_WRITERS_CPU: Final = 1


@dataclass(frozen=True, kw_only=True)
class Writing:
    """The running parts of a writing rank, and the facts that it announces."""

    facts: RunnerFacts
    rank_dir: RankDir
    weights: Weights
    capture: CaptureInfo
    tap: Tap

    def announce(self, method: str) -> None:
        """Write READY.json, and rewrite it whenever the weights change. Raises OSError.

        method: how the states are captured from now on.
        """
        ready = Ready(
            boot_id=self.rank_dir.boot_id,
            rank=self.rank_dir.rank,
            process=own_process(host=self.facts.host, port=self.facts.port),
            engine=self.facts.engine,
            model=self.facts.model,
            weights=self.weights.info,
            capture=replace(self.capture, method=method),
        )

        def write_again() -> None:
            # READY.json is removed when the capture turns out to be wrong, and must stay removed.
            if self.rank_dir.directory.is_regular(READY_NAME):
                write_ready(self.rank_dir, replace(ready, weights=self.weights.info))

        write_ready(self.rank_dir, ready)
        self.weights.watch(write_again)


def start_writing(
    *,
    settings: Settings,
    facts: RunnerFacts,
    rank_dir: RankDir,
    weights: Weights,
    boundaries: tuple[int, ...],
    method: str,
) -> Writing:
    """Allocate the ring and start the writer processes.

    Raises RingError, WriterError, or the device's error for the allocation.
    """
    states = StateLayout(
        boundaries=boundaries,
        hidden_size=facts.model.hidden_size,
        dtype=facts.model.dtype,
        last_kind=settings.last_kind,
    )
    layout = SlotLayout(states)
    stager = make_stager(facts.device)
    plan = plan_ring(
        layout=layout,
        forward_rows=facts.max_forward_rows,
        num_slots=settings.writers.ring_slots,
        total_bytes=settings.writers.ring_bytes,
        pinned=stager.pinned,
    )
    ring = Ring(plan, pinned=stager.pinned)
    stats = Stats(rank_dir)
    num_writers = settings.writers.num_writers
    num_writers = num_writers or (_WRITERS_CUDA if stager.pinned else _WRITERS_CPU)
    assignment = Assignment(
        rank_dir=rank_dir,
        states=states,
        ring=plan,
        ring_descriptor=ring.descriptor,
        log_level=settings.log_level,
    )
    pool = WriterPool(
        WriterSupervisor(assignment),
        num_writers=num_writers,
        rank_dir=rank_dir,
        ring=ring,
        stager=stager,
        stats=stats,
    )
    pool.start()
    tap = Tap(
        rid_prefix=settings.rid_prefix,
        layout=layout,
        ring=ring,
        stager=stager,
        writers=pool,
        stats=stats,
        weights=weights,
    )
    capture = CaptureInfo(
        plugin_version=plugin_version(),
        boundaries=boundaries,
        last_kind=settings.last_kind,
        method=method,
        rid_prefix=settings.rid_prefix,
        ring_bytes=plan.total_bytes,
        num_writers=num_writers,
    )
    return Writing(facts=facts, rank_dir=rank_dir, weights=weights, capture=capture, tap=tap)

"""What the plugin takes from the scheduler's thread, without a GPU and without a model.

    python -m benchmarks.tap_cost [--requests 16 64]

A thread that works in Python, as the scheduler's does between two forwards, hands over forwards of
tiny rows. Printed per forward, in milliseconds:

- tap:     the thread's time in the tap
- threads: processor time of the plugin's own threads in the process, which share its interpreter
- lost:    how much longer the thread took for the same work than without the plugin, tap included
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch

from benchmarks.command import command_parser, number_from, run_command
from benchmarks.sinks import NullSink
from server_patch.directory import Directory
from server_patch.dump_dir import RankDir
from server_patch.dump_format import StateLayout
from server_patch.ring import Ring, plan_ring
from server_patch.sglang_api import PrefillBatch
from server_patch.slot_layout import SlotLayout
from server_patch.staging import CpuStager, States
from server_patch.stats import Stats
from server_patch.tap import Tap
from server_patch.weights import Weights
from server_patch.writer_pool import WriterPool
from server_patch.writer_protocol import Assignment
from server_patch.writer_supervisor import WriterSupervisor

HIDDEN_SIZE = 64
TOKENS = 16  # of a request
WORK_MS = 10.0  # of the engine's thread between two forwards
BOUNDARIES = (2, 4, 5)


def make_tap(directory: Path, *, rows: int, num_writers: int) -> tuple[Tap, WriterSupervisor]:
    """A tap with all that is behind it in a server."""
    states = StateLayout(
        boundaries=BOUNDARIES, hidden_size=HIDDEN_SIZE, dtype="BF16", last_kind="post"
    )
    layout = SlotLayout(states)
    plan = plan_ring(layout=layout, forward_rows=rows, num_slots=4, total_bytes=None, pinned=False)
    ring = Ring(plan, pinned=False)
    rank_dir = RankDir(
        directory=Directory.open(directory), boot_id="benchmark", rank=0, file_mode=0o600
    )
    stats = Stats(rank_dir)
    stager = CpuStager()
    assignment = Assignment(
        rank_dir=rank_dir, states=states, ring=plan, ring_descriptor=ring.descriptor
    )
    supervisor = WriterSupervisor(assignment)
    writers = WriterPool(
        supervisor,
        num_writers=num_writers,
        rank_dir=rank_dir,
        ring=ring,
        stager=stager,
        stats=stats,
    )
    writers.start()
    tap = Tap(
        rid_prefix="xtr-",
        layout=layout,
        ring=ring,
        stager=stager,
        writers=writers,
        stats=stats,
        weights=Weights(boot_id="benchmark"),
    )
    return tap, supervisor


def make_forward(requests: int) -> tuple[PrefillBatch, States]:
    rows = requests * TOKENS
    ids = torch.arange(rows)
    batch = PrefillBatch(
        rids=[f"xtr-benchmark-{number}-1" for number in range(requests)],
        extend_lens=[TOKENS] * requests,
        prefix_lens=[0] * requests,
        prompt_lens=[TOKENS] * requests,
        live_rows=rows,
        input_ids=ids,
    )
    state = torch.zeros(rows, HIDDEN_SIZE, dtype=torch.bfloat16)
    return batch, States(aux=[state] * len(BOUNDARIES), last=state, last_pre=None, input_ids=ids)


def work(loops: int) -> float:
    """The engine's own Python; seconds it took."""
    begun = time.perf_counter()
    total = 0
    for number in range(loops):
        total += number & 7
    return time.perf_counter() - begun


def loops_for(milliseconds: float) -> int:
    loops = 100_000
    seconds = min(work(loops) for _ in range(20))
    return int(loops * milliseconds / 1e3 / seconds)


def measure(requests: int, *, forwards: int, num_writers: int) -> dict[str, float]:
    """Medians per forward, in milliseconds."""
    loops = loops_for(WORK_MS)
    batch, states = make_forward(requests)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name, NullSink([Path(name)]):
        plain, patched, taps = [], [], []
        tap, writers = make_tap(Path(name), rows=requests * TOKENS, num_writers=num_writers)
        try:
            for _ in range(20):
                tap.take(batch, states)
            other_cpu = 0.0
            for _ in range(forwards // 20):  # interleaved, so that a drifting machine shows in both
                time.sleep(0.1)  # the plugin has come to rest
                plain += [work(loops) for _ in range(20)]
                cpu = time.process_time() - time.thread_time()
                for _ in range(20):
                    begun = time.perf_counter()
                    tap.take(batch, states)
                    taken = time.perf_counter() - begun
                    taps.append(taken)
                    patched.append(taken + work(loops))
                other_cpu += time.process_time() - time.thread_time() - cpu
        finally:
            writers.stop()
    return {
        "tap": 1e3 * statistics.median(taps),
        "threads": 1e3 * other_cpu / forwards,
        "lost": 1e3 * (statistics.median(patched) - statistics.median(plain)),
    }


def main() -> None:
    parser = command_parser(__doc__, __file__)
    parser.add_argument(
        "--requests", type=number_from(1), nargs="+", default=[16, 64], help="in a forward"
    )
    parser.add_argument("--forwards", type=number_from(20), default=200, help="in all, in twenties")
    parser.add_argument(
        "--writers", type=number_from(1), default=1, help="processes that write dumps"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    for requests in options.requests:
        figures = measure(requests, forwards=options.forwards, num_writers=options.writers)
        print(
            f"{requests:4d} requests: "
            + ", ".join(f"{name} {value:.2f} ms" for name, value in figures.items())
            + f" ({threading.active_count()} threads)",
            flush=True,
        )


if __name__ == "__main__":
    run_command(main)

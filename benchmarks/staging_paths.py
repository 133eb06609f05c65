"""Where the limit of the way from the device to /dev/shm lies, step by step.

    python -m benchmarks.staging_paths [--bytes 268435456]

Prints one line of JSON per figure:

- to-ring:       one device-to-host copy into the pinned ring, GB/s
- small-copy:    how long a copy of 64 numbers takes beside a large one
- write:         files of fresh pages written from the ring by N processes, GB/s
- rewrite:       the same into files that exist already, whose pages are reused
- register:      device memory copied straight into the pages of a new file, which are registered
                 with the device before and released after, GB/s

Without a GPU only `write` and `rewrite` are measured. torch is imported where it is used: the
writer processes do without.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.command import Failed, command_parser, number_from, run_command

if TYPE_CHECKING:
    import torch

FILE_BYTES = 32 << 20  # a prompt of 2,048 tokens, four states of 2,048 bfloat16 each
REPEATS = 5
PATIENCE_S = 60.0  # for processes that start, or write their files


def show(name: str, **figures: object) -> None:
    print(json.dumps({"figure": name, **figures}), flush=True)


def _median_s(action: Callable[[], None]) -> float:
    seconds = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


# ---- files --------------------------------------------------------------------------------------


def _write_files(
    directory: str, number: int, num_files: int, reuse: bool, barrier: Any, rounds: int
) -> None:
    """One writer process: `num_files` files a round from one source, as the plugin's do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches us too; our parent stops us
    source = memoryview(mmap.mmap(-1, FILE_BYTES))
    source[:] = b"\1" * FILE_BYTES
    paths = [Path(directory) / f"{number}-{index}" for index in range(num_files)]
    if reuse:
        for path in paths:
            path.write_bytes(source)
    flags = os.O_WRONLY | os.O_CREAT | (0 if reuse else os.O_EXCL)
    for _ in range(rounds):
        barrier.wait()
        for path in paths:
            descriptor = os.open(path, flags, 0o600)
            os.write(descriptor, source)
            os.close(descriptor)
        barrier.wait()
        if not reuse:
            for path in paths:
                path.unlink()


def measure_writes(total_bytes: int) -> None:
    context = multiprocessing.get_context("spawn")
    for reuse in (False, True):
        for num_writers in (1, 2, 4, 6, 8):
            if num_writers > (os.cpu_count() or 1):
                continue
            num_files = max(1, total_bytes // FILE_BYTES // num_writers)
            barrier = context.Barrier(num_writers + 1)
            with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
                writers = [
                    context.Process(
                        target=_write_files,
                        args=(directory, number, num_files, reuse, barrier, REPEATS),
                    )
                    for number in range(num_writers)
                ]
                try:
                    for writer in writers:
                        writer.start()
                    seconds = []
                    for _ in range(REPEATS):
                        barrier.wait(PATIENCE_S)
                        begun = time.perf_counter()
                        barrier.wait(PATIENCE_S)
                        seconds.append(time.perf_counter() - begun)
                except threading.BrokenBarrierError:
                    raise Failed("a writer ended early: see what it says above") from None
                finally:
                    for writer in writers:
                        if writer.pid is not None:
                            writer.terminate()
                            writer.join()
            written = num_writers * num_files * FILE_BYTES
            show(
                "rewrite" if reuse else "write",
                writers=num_writers,
                gigabytes_per_s=written / statistics.median(seconds) / 1e9,
            )


# ---- device -------------------------------------------------------------------------------------


def _register(memory: torch.Tensor) -> None:
    import torch

    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(error) != 0:
        raise Failed(f"cudaHostRegister: error {int(error)}")


def _unregister(memory: torch.Tensor) -> None:
    import torch

    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def _mapped(descriptor: int, size: int) -> torch.Tensor:
    import torch

    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)


def measure_copies(total_bytes: int) -> None:
    import torch

    from server_patch.ring import RingSlot
    from server_patch.staging import CudaStager

    source = torch.ones(total_bytes, dtype=torch.uint8, device="cuda")
    descriptor = os.memfd_create("ring")
    os.ftruncate(descriptor, total_bytes)
    ring = _mapped(descriptor, total_bytes)
    ring.zero_()
    _register(ring)
    stream = torch.cuda.Stream()
    stager = CudaStager(source.device)

    def submit(part_bytes: int) -> None:
        with torch.cuda.stream(stream):
            for part, piece in zip(ring.split(part_bytes), source.split(part_bytes), strict=True):
                part.copy_(piece, non_blocking=True)
        stream.synchronize()

    def drive() -> None:
        slot = RingSlot(ring, 0)
        gathered = torch.cuda.Event()
        gathered.record()
        slot.source = (source, gathered)
        stager.wait(slot)

    for how, copy in {
        "in one part": lambda: submit(total_bytes),
        "in parts of 16 MiB, all submitted at once": lambda: submit(16 << 20),
        "as the plugin does, by its own thread": drive,
    }.items():
        copy()
        show("to-ring", how=how, gigabytes_per_s=total_bytes / _median_s(copy) / 1e9)
        show("small-copy", beside=how, milliseconds=_small_copy_ms(copy))
    _unregister(ring)
    _measure_registering(source)


def _small_copy_ms(copy: Callable[[], None]) -> float:
    """Milliseconds until 64 numbers are on the host, begun while another thread is in `copy`."""
    import torch

    numbers = torch.zeros(64, dtype=torch.int64, device="cuda")
    target = torch.empty(64, dtype=torch.int64, pin_memory=True)
    elapsed = []
    for _ in range(REPEATS * 4):
        torch.cuda.synchronize()
        begun = torch.cuda.Event(enable_timing=True)
        ended = torch.cuda.Event(enable_timing=True)
        thread = threading.Thread(target=copy)
        thread.start()
        torch.cuda._sleep(1_000_000)  # about 0.5 ms
        begun.record()
        target.copy_(numbers, non_blocking=True)
        ended.record()
        thread.join()
        torch.cuda.synchronize()
        elapsed.append(begun.elapsed_time(ended))
    return float(statistics.median(elapsed))


def _measure_registering(source: torch.Tensor) -> None:
    import torch

    spent = {"map": 0.0, "register": 0.0, "copy": 0.0, "release": 0.0}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        for number in range(REPEATS):
            marks = [time.perf_counter()]
            descriptor = os.open(Path(directory) / str(number), os.O_RDWR | os.O_CREAT, 0o600)
            os.posix_fallocate(descriptor, 0, source.nbytes)
            memory = _mapped(descriptor, source.nbytes)
            marks.append(time.perf_counter())
            _register(memory)
            marks.append(time.perf_counter())
            memory.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            marks.append(time.perf_counter())
            _unregister(memory)
            del memory
            os.close(descriptor)
            marks.append(time.perf_counter())
            for name, begun, ended in zip(spent, marks, marks[1:], strict=False):
                spent[name] += ended - begun
    total = sum(spent.values())
    show(
        "register",
        gigabytes_per_s=REPEATS * source.nbytes / total / 1e9,
        milliseconds={name: 1e3 * seconds / REPEATS for name, seconds in spent.items()},
    )


def main() -> None:
    parser = command_parser(__doc__, __file__)
    parser.add_argument("--bytes", type=number_from(1), default=256 << 20, help="of one forward")
    options = parser.parse_args()
    import torch

    if torch.cuda.is_available():
        measure_copies(options.bytes)
    else:
        print("no GPU here: only `write` and `rewrite` are measured", file=sys.stderr)
    measure_writes(options.bytes)


if __name__ == "__main__":
    run_command(main)

"""Runs inputs of one group of targets: `python -m fuzz.child GROUP TARGET FIRST COUNT ...`.

A line of JSON for each fault goes to standard output. The parent sees a death or a hang by the exit
status and by the line in the progress file, which names the input at work.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import random
import resource
import sys
import tempfile
import traceback
from pathlib import Path

from extractor.core.errors import exit_code, first_known
from fuzz.target import Run, Target, chance_of
from fuzz.targets import group

#: An input that takes longer hangs: others take milliseconds.
HANG_S = 20.0
#: More than this above the process before the first input is a fault.
MAX_GROWTH_BYTES = 300 << 20
#: Protects the machine from an input that asks for everything at once.
MAX_ADDRESS_SPACE_BYTES = 4 << 30
MAX_FRAMES = 6


def main(words: list[str]) -> None:
    progress = int(os.environ["FUZZ_PROGRESS"])
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_SPACE_BYTES, MAX_ADDRESS_SPACE_BYTES))
    targets, numbers = group(words[0]), iter(words[1:])
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        for name, first, count in zip(numbers, numbers, numbers, strict=True):
            directory = Path(scratch) / name
            directory.mkdir()
            seeds = range(int(first), int(first) + int(count))
            run_target(targets[name], directory, seeds, progress)
        os.pwrite(progress, b"done".ljust(64), 0)


def run_target(target: Target, directory: Path, seeds: range, progress: int) -> None:
    run = target.prepare(directory)
    for number in range(3):  # imports, caches
        problem_of(run, random.Random(f"warm up {number}"))
    gc.collect()
    start_bytes = _reset_peak()
    for seed in seeds:
        os.pwrite(progress, f"{target.name} {seed}".encode().ljust(64), 0)
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        problem = problem_of(run, chance_of(target, seed))
        faulthandler.cancel_dump_traceback_later()
        grown_bytes = _peak() - start_bytes
        if problem is None and grown_bytes > MAX_GROWTH_BYTES:
            problem = f"{grown_bytes >> 20} MiB above the start"
        if grown_bytes > MAX_GROWTH_BYTES // 2:
            gc.collect()
            _reset_peak()
        if problem is not None:
            fault = {"target": target.name, "seed": seed, "problem": problem}
            sys.stdout.write(json.dumps(fault) + "\n")
            sys.stdout.flush()


def problem_of(run: Run, chance: random.Random) -> str | None:
    """The error that one input raises, unless it is one that a person sees as a message."""
    try:
        run(chance)
    except BaseException as error:  # a panic of a Rust library is not an Exception
        if exit_code(first_known(error)) is None:
            return _shown(error)
    return None


def _shown(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-MAX_FRAMES:]
    where = " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames))
    return f"{type(error).__name__}: {str(error)[:300]} at {where}"


def _peak() -> int:
    """The most resident memory since `_reset_peak`, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def _reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


if __name__ == "__main__":
    main(sys.argv[1:])

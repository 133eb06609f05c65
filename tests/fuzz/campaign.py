"""Starts the children that run inputs, and collects what goes wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Deaths and hangs of one group after which the rest is left out.
MAX_DEATHS = 10


@dataclass(frozen=True)
class Fault:
    """One input, and what went wrong with it."""

    target: str
    seed: int
    problem: str

    def __str__(self) -> str:
        return f"PYTHONPATH=tests python -m fuzz {self.target} {self.seed}\n    {self.problem}"


def faults_of(group: str, seeds: Mapping[str, range]) -> list[Fault]:
    """Run inputs of a group's targets in child processes. `seeds`: by the target's name.

    A child that dies or hangs is replaced by one that begins behind the input at work.
    """
    left = dict(seeds)
    faults: list[Fault] = []
    for _ in range(MAX_DEATHS):
        found, at = _run_child(group, left)
        faults += found
        if at is None:
            return faults
        faults.append(at)
        names = list(left)
        left = {name: left[name] for name in names[names.index(at.target) :]}
        left[at.target] = range(at.seed + 1, left[at.target].stop)
    raise AssertionError(f"{MAX_DEATHS} children died:\n" + "\n".join(map(str, faults)))


def _run_child(group: str, seeds: Mapping[str, range]) -> tuple[list[Fault], Fault | None]:
    """The faults that the child reported, and the one that it died of."""
    words = [word for name, r in seeds.items() for word in (name, str(r.start), str(len(r)))]
    with tempfile.TemporaryFile() as progress, tempfile.TemporaryFile() as errors:
        done = subprocess.run(
            [sys.executable, "-X", "faulthandler", "-m", "fuzz.child", group, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            pass_fds=(progress.fileno(),),
            env={
                **os.environ,
                "FUZZ_PROGRESS": str(progress.fileno()),
                "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests"))),
            },
        )
        faults = [Fault(**json.loads(line)) for line in done.stdout.splitlines()]
        at = os.pread(progress.fileno(), 64, 0).decode().strip()
        if done.returncode == 0 and at == "done":
            return faults, None
        errors.seek(max(0, errors.tell() - 4000))
        tail = errors.read().decode(errors="replace")
    if " " not in at or at == "done":
        raise RuntimeError(f"the child ended with {done.returncode} before its first input: {tail}")
    name, _, seed = at.partition(" ")
    problem = f"the process ended with {done.returncode}: {_essence(tail)}"
    return faults, Fault(name, int(seed), problem)


def _essence(tail: str) -> str:
    """The first lines of faulthandler's report."""
    _, _, report = tail.rpartition("Timeout (")
    lines = [line.strip() for line in (report or tail).splitlines() if line.strip()]
    return " | ".join(lines[:9])

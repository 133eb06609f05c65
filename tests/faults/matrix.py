"""Plays cases, each in a process of its own: what it mounts or leaves is gone with it."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection

from extractor.core.humanize import table
from faults.arena import Arena, undisturbed_digests
from faults.cases import Case, all_cases

_FORK_SERVER = multiprocessing.get_context("forkserver")
_FORK_SERVER.set_forkserver_preload(["faults.matrix"])


@dataclass(frozen=True)
class Outcome:
    """How one case ended."""

    name: str
    problem: str | None  # None: passed
    is_skipped: bool
    seconds: float


def play(name: str, undisturbed: dict[int, str]) -> Outcome:
    """Play one case, in another process."""
    ours, theirs = _FORK_SERVER.Pipe(duplex=False)
    process = _FORK_SERVER.Process(target=_play, args=(name, undisturbed, theirs))
    process.start()
    theirs.close()
    try:
        outcome: Outcome = ours.recv()
    except EOFError:
        process.join()
        outcome = Outcome(name, f"the case's process ended with {process.exitcode}", False, 0.0)
    process.join()
    return outcome


def _play(name: str, undisturbed: dict[int, str], connection: Connection) -> None:
    (case,) = (case for case in all_cases() if case.name == name)
    started = time.monotonic()
    problem, is_skipped = None, False
    try:
        with Arena() as arena:
            case.check(arena, undisturbed)
    except PermissionError as error:
        problem, is_skipped = str(error), True
    except Exception as error:
        problem = f"{error}\n{traceback.format_exc(limit=-3)}"
    connection.send(Outcome(name, problem, is_skipped, time.monotonic() - started))


def play_all(cases: Sequence[Case], *, num_jobs: int) -> Iterator[Outcome]:
    """Outcomes in the order of the cases, as they come."""
    undisturbed = undisturbed_digests()
    with ThreadPoolExecutor(num_jobs) as threads:
        yield from threads.map(lambda case: play(case.name, undisturbed), cases)


def as_table(outcomes: Sequence[Outcome]) -> str:
    """One line for each kind and step: passed of all."""
    rows: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        kind, _, rest = outcome.name.partition(":")
        rows.setdefault((kind, rest.partition(":")[0]), []).append(outcome)
    lines: list[tuple[str, ...]] = [("fault", "at", "passed", "of", "seconds")]
    for (kind, step), found in rows.items():
        passed = sum(outcome.problem is None for outcome in found)
        seconds = sum(outcome.seconds for outcome in found)
        lines.append((kind, step, str(passed), str(len(found)), f"{seconds:.1f}"))
    width = max(len(line[1]) for line in lines)
    return table([(kind, step.ljust(width), *rest) for kind, step, *rest in lines])

"""The cases by name: what happens, and what the next commands must make of it.

A name is `kind:step:when:nth` or the like; the kind and the step are the rows of the table.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from faults.arena import Arena, Ended
from faults.steps import Fault

SEED = 4
#: Of one undisturbed run, how often each step is sure to be reached: which n-th times can be asked
#: for. What depends on the size of a group commit is asked for early.
KILL_POINTS: dict[str, tuple[int, ...]] = {
    "trial-unlink": (1, 2),
    "lock": (1,),
    "manifest-begin": (1,),
    "provenance-write": (1,),
    "provenance-sync": (1,),
    "provenance-rename": (1,),
    "out-sync": (1,),
    "request": (1, 2, 9, 24),
    "dump-seen": (1, 3, 20, 60),
    "manifest-add-shard": (1, 2, 3),
    "shard-create": (1, 2, 3),
    "copy": (1, 2, 4),
    "shard-sync": (1, 2, 4),
    "manifest-inside": (1, 2, 12, 24),
    "manifest-commit": (1, 2, 3, 7),
    "dump-unlink": (1, 2, 3, 30, 60),
    "seal-trim": (1, 2, 3),
    "header-write": (1, 2, 3),
    "seal-sync": (1, 2, 3),
    "seal-rename": (1, 2, 3),
    "shards-sync": (1, 2, 3, 5),
    "manifest-seal": (1, 2, 3),
}  # fmt: skip

Check = Callable[[Arena, dict[int, str]], None]


@dataclass(frozen=True)
class Case:
    """One row's worth of trouble."""

    name: str
    check: Check  # (arena, digests of an undisturbed run); raises AssertionError
    is_main: bool = False  # runs with `make test-all`


def resume(arena: Arena, undisturbed: dict[int, str], *, kills: int) -> Ended:
    """The same command completes, and all is as if nothing had happened."""
    ended = arena.run()
    assert ended.code == 0, f"the same command again: {ended}"
    arena.assert_whole(undisturbed)
    arena.assert_sent_at_most(kills)
    return ended


def must_end(ended: Ended, *codes: int) -> None:
    assert ended.has_fired, f"the fault never happened; {ended}"
    assert ended.code in codes, f"must exit with {codes}: {ended}"
    assert "Traceback" not in ended.stderr, ended.stderr


# --- kill -9 -------------------------------------------------------------------------------------


def killed(fault: Fault, arena: Arena, undisturbed: dict[int, str]) -> None:
    """Kill -9 of the client."""
    arena.start_server()
    must_end(arena.run(plan=[fault]), -9)
    resume(arena, undisturbed, kills=1)


def both_killed(fault: Fault, arena: Arena, undisturbed: dict[int, str]) -> None:
    """Kill -9 of client and server; the next server counts its dumps from 0 again."""
    arena.start_server()
    must_end(arena.run(plan=[fault]), -9)
    arena.stop_server()
    arena.start_server()
    resume(arena, undisturbed, kills=1)


def server_killed(fault: Fault, arena: Arena, undisturbed: dict[int, str]) -> None:
    """Kill -9 of the server: the run ends with 3, or had all it needed."""
    arena.start_server()
    ended = arena.run(plan=[fault])
    must_end(ended, 0, 3)
    if ended.code == 3:
        is_told = "run the same command again" in ended.stderr
        assert is_told or "the probe prompt failed" in ended.stderr, ended
    arena.start_server()
    resume(arena, undisturbed, kills=1)


def killed_again_and_again(seed: int, arena: Arena, undisturbed: dict[int, str]) -> None:
    """Kills in a row, each at a step of chance, of the run and of its resumes."""
    chance = random.Random(seed)
    kills = 0
    arena.start_server()
    for _ in range(4):
        step = chance.choice(sorted(KILL_POINTS))
        fault = Fault(
            step=step,
            when=chance.choice(["before", "after"]),
            nth=chance.choice(KILL_POINTS[step][:3]),
            action="kill",
        )
        ended = arena.run(plan=[fault])
        assert ended.code in (0, -9), ended
        kills += ended.code == -9
        if chance.random() < 0.3:
            arena.stop_server()
            arena.start_server()
    resume(arena, undisturbed, kills=kills)


def killed_in_resume(fault: Fault, arena: Arena, undisturbed: dict[int, str]) -> None:
    """A kill, and another in the run that cleans up after it."""
    arena.start_server()
    must_end(arena.run(plan=[Fault(step="dump-unlink", nth=25)]), -9)
    ended = arena.run(plan=[fault])
    must_end(ended, -9)
    resume(arena, undisturbed, kills=2)


def kill_cases() -> Iterator[Case]:
    for step, times in KILL_POINTS.items():
        for nth in times:
            for when in ("before", "after"):
                fault = Fault(step=step, when=when, nth=nth)
                is_main = nth == times[len(times) // 2]
                yield Case(f"kill:{step}:{when}:{nth}", partial(killed, fault), is_main)
    for step in ("copy", "header-write"):
        for nth in KILL_POINTS[step]:
            fault = Fault(step=step, nth=nth, action="tear")
            yield Case(f"kill:{step}:torn:{nth}", partial(killed, fault), nth == 2)
    for step in ("request", "dump-seen", "copy", "shard-sync", "manifest-commit", "dump-unlink",
                 "seal-rename", "manifest-seal"):  # fmt: skip
        for nth in KILL_POINTS[step][:3]:
            for when in ("before", "after"):
                fault = Fault(step=step, when=when, nth=nth, action="kill-both")
                is_main = (nth, when) == (2, "after")
                yield Case(f"kill-both:{step}:{when}:{nth}", partial(both_killed, fault), is_main)
                fault = Fault(step=step, when=when, nth=nth, action="kill-server")
                yield Case(
                    f"kill-server:{step}:{when}:{nth}", partial(server_killed, fault), is_main
                )
    for step in ("lock", "out-sync", "request", "copy", "shard-sync",
                 "manifest-commit", "dump-unlink", "header-write", "seal-rename", "shards-sync",
                 "manifest-seal"):  # fmt: skip
        for when in ("before", "after"):
            fault = Fault(step=step, when=when)
            yield Case(
                f"kill-in-resume:{step}:{when}:1", partial(killed_in_resume, fault),
                when == "after",
            )  # fmt: skip
    for seed in range(30):
        yield Case(
            f"kill-chain:seed:{seed}", partial(killed_again_and_again, SEED * 1000 + seed), seed < 4
        )


def all_cases() -> list[Case]:
    """Every case, in the order of the table."""
    from faults import cases_disk, cases_server, cases_shards

    cases = [
        *kill_cases(),
        *cases_disk.cases(),
        *cases_shards.cases(),
        *cases_server.cases(),
    ]
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    return cases

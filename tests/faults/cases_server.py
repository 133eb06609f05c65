"""Servers that refuse, hang, lie, die and come back; signals; two runs; clocks."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Iterator
from functools import partial

from extractor.testing.faults import LATE_S, FaultPlan
from extractor.testing.faults import Fault as ServerFault
from faults.arena import AS_IF_LARGE, NUM_PROMPTS, Arena, as_if_large
from faults.cases import SEED, Case, must_end, resume
from faults.steps import Fault

#: All prompts are in progress, so that failures show of the server, not of the one prompt that is
#: tried again and again within milliseconds.
HURRY = as_if_large(
    health={"gone_after_s": 0.4, "useless_after_s": 0.4, "trial_after_s": 0.1},
    store={"group_samples": NUM_PROMPTS},
)
WAITS_FOR_LATE = as_if_large(collect={"late_dumps_s": 2 * LATE_S})
SHORT_TIMEOUTS = ("--request-timeout", 0.4, "--dump-timeout", 0.4)
#: What a server may do to a request without the row being lost.
PASSING = (
    "busy", "too_many", "error", "reset", "silent", "late", "close", "other_rid", "no_dump",
    "duplicate", "lost_copy", "queue_abort", "odd_reply", "drip", "short_dump",
    "double_dump", "wrong_ids", "nonfinite", "error_record", "torn_dump", "cached",
)  # fmt: skip
LASTING = {"reject": "rejected", "wrong_boundaries": "wrong_layout", "truncated": "truncated"}


def some(fault: ServerFault, share: float, seed: int) -> FaultPlan:
    """That share of all requests behind the probe, by chance."""
    chance = random.Random(seed)
    rolls: dict[int, float] = {}

    def plan(number: int, rid: str) -> ServerFault | None:
        roll = rolls.setdefault(number, chance.random())
        return fault if number and "probe" not in rid and roll < share else None

    return plan


def ordinal_of(rid: str) -> int | None:
    return None if "probe" in rid else int(rid.split("-")[3])


# --- answers -------------------------------------------------------------------------------------


def half_fail(name: str, seed: int, arena: Arena, undisturbed: dict[int, str]) -> None:
    """Half of all requests go wrong; the run ends with every row stored."""
    arena.start_server(faults=some(ServerFault(name), 0.5, seed))
    timings = WAITS_FOR_LATE if name == "late" else AS_IF_LARGE
    ended = arena.run(*SHORT_TIMEOUTS, "--max-attempts", 40, timings=timings)
    assert ended.code == 0, ended
    arena.assert_whole(undisturbed)


def one_row_is_refused(name: str, reason: str, arena: Arena, undisturbed: dict[int, str]) -> None:
    """What is wrong with one row fails that row, and no other."""
    fault = ServerFault(name)
    arena.start_server(faults=lambda number, rid: fault if ordinal_of(rid) == 7 else None)
    ended = arena.run(*SHORT_TIMEOUTS)
    assert ended.code == 1, ended
    assert f"p.jsonl:8: {reason}:" in ended.stderr, ended
    arena.assert_whole(undisturbed, without=[7])
    again = arena.run(*SHORT_TIMEOUTS)
    assert again.code == 1, again
    arena.stop_server()
    arena.start_server()
    assert arena.run("--retry-failed").code == 0
    arena.assert_whole(undisturbed)


def nothing_is_served(name: str, arena: Arena, undisturbed: dict[int, str]) -> None:
    """For ever is not for ever: exit 3, and no row is to blame."""
    fault = ServerFault(name)
    arena.start_server(faults=lambda number, rid: fault if number > 9 else None)
    ended = arena.run(*SHORT_TIMEOUTS, timings=HURRY)
    assert ended.code == 3, ended
    assert "p.jsonl:" not in ended.stderr, ended
    arena.stop_server()
    arena.start_server()
    ended = arena.run()
    assert ended.code == 0, ended
    arena.assert_whole(undisturbed)


def one_prompt_kills(ordinal: int, arena: Arena, undisturbed: dict[int, str]) -> None:
    """The server dies whenever it gets one prompt: that is set aside, the rest is stored."""

    def plan(number: int, rid: str) -> ServerFault | None:
        return ServerFault.DIE if ordinal_of(rid) == ordinal else None

    for _ in range(2):
        arena.start_server(faults=plan)
        ended = arena.run()
        assert ended.code == 3, ended
        assert "died" in ended.stderr, ended
    assert f"p.jsonl:{ordinal + 1}: kills_server: " in ended.stderr, ended
    arena.start_server(faults=plan)
    ended = arena.run()
    assert ended.code == 1, ended
    status = arena.command("status", arena.out)
    assert "kills_server" in status.stdout, status
    arena.assert_whole(undisturbed, without=[ordinal])
    assert arena.ordinals_sent().count(ordinal) == 2


def two_prompts_kill(arena: Arena, undisturbed: dict[int, str]) -> None:
    """Two such prompts side by side: each is found, and no innocent one."""

    def plan(number: int, rid: str) -> ServerFault | None:
        return ServerFault.DIE if ordinal_of(rid) in (5, 6) else None

    codes = []
    for _ in range(6):
        arena.start_server(faults=plan)
        codes.append(arena.run().code)
        if codes[-1] != 3:
            break
    assert codes[-1] == 1, codes
    arena.assert_whole(undisturbed, without=[5, 6])


# --- signals -------------------------------------------------------------------------------------


def interrupted(
    names: tuple[str, ...], fault: Fault, arena: Arena, undisturbed: dict[int, str]
) -> None:
    """A signal ends the run in order; a second one at once; both leave it resumable."""
    arena.start_server(delay_s=0.01)
    plan = [Fault(step=fault.step, nth=fault.nth, action=f"signal:{name}") for name in names]
    ended = arena.run(plan=plan)
    must_end(ended, 130, 0)
    if len(names) == 1 and ended.code == 130:
        # In order: what was in flight is stored, and nothing is left under the dump root.
        assert arena.dumps() == []
    resume(arena, undisturbed, kills=1)


# --- others --------------------------------------------------------------------------------------


def two_runs(arena: Arena, undisturbed: dict[int, str]) -> None:
    """A second run on the same directory says whose pid holds it, and changes nothing."""
    arena.start_server()
    first = arena.start_run(plan=[Fault(step="dump-unlink", nth=10, action="stop")])
    arena.wait_for_fault(first)
    second = arena.run()
    assert second.code == 2, second
    assert f"process {first[0].pid}" in second.stderr, second
    assert first[0].pid is not None
    os.kill(first[0].pid, signal.SIGCONT)
    assert arena.end(first).code == 0
    arena.assert_whole(undisturbed)
    arena.assert_sent_at_most(0)


def two_outputs(arena: Arena, undisturbed: dict[int, str]) -> None:
    """Two runs side by side on one server: neither touches the other's dumps."""
    arena.start_server(delay_s=0.002)
    other = arena.start_run("--out", arena.directory / "other")
    ended = arena.run()
    assert ended.code == 0, ended
    assert arena.end(other).code == 0
    arena.assert_whole(undisturbed)


def clock_set_back(arena: Arena, undisturbed: dict[int, str]) -> None:
    """The wall clock goes back a year between two sessions and in the middle of each."""
    arena.start_server()
    years = itertools.count()
    backwards = {"time.time": lambda: 1.8e9 - 3e7 * next(years)}
    must_end(arena.run(plan=[Fault(step="dump-unlink", nth=20)], patches=backwards), -9)
    ended = arena.run(patches=backwards)
    assert ended.code == 0, ended
    arena.assert_whole(undisturbed)
    arena.assert_sent_at_most(1)


def counters_begin_again(kills: int, arena: Arena, undisturbed: dict[int, str]) -> None:
    """Servers that die again and again; each counts its dumps from 0 under a new boot id."""
    for _ in range(kills):
        arena.start_server()
        plan = [Fault(step="dump-unlink", nth=3, action="kill-server")]
        must_end(arena.run(plan=plan), 0, 1, 3)
    arena.start_server()
    # A prompt that was alone with two dying servers is set aside, though it was not its fault.
    assert arena.run("--retry-failed").code == 0
    resume(arena, undisturbed, kills=kills)


def comes_back(fault: Fault, arena: Arena, undisturbed: dict[int, str]) -> None:
    """With --server-wait, one command lives through the death of its server."""
    arena.start_server()
    started = arena.start_run("--server-wait", 60, plan=[fault])
    arena.wait_for_words(started, "waiting up to")
    arena.start_server()
    ended = arena.end(started)
    must_end(ended, 0)
    arena.assert_whole(undisturbed)
    arena.assert_sent_at_most(1)


def poison_with_a_supervisor(arena: Arena, undisturbed: dict[int, str]) -> None:
    """Somebody starts the server again whenever it dies: one command does all but one row."""

    def plan(number: int, rid: str) -> ServerFault | None:
        return ServerFault.DIE if ordinal_of(rid) == 9 else None

    arena.start_server(faults=plan)
    started = arena.start_run("--server-wait", 60)
    for death in (1, 2):
        arena.wait_for_words(started, "waiting up to", death)
        arena.start_server(faults=plan)
    ended = arena.end(started)
    assert ended.code == 1, ended
    assert "p.jsonl:10: kills_server: " in ended.stderr, ended
    arena.assert_whole(undisturbed, without=[9])
    assert arena.ordinals_sent().count(9) == 2


def cases() -> Iterator[Case]:
    for name in PASSING:
        for seed in range(3):
            yield Case(
                f"answers:{name}:half:{seed}", partial(half_fail, name, SEED + seed), seed == 0
            )
    for name, reason in LASTING.items():
        yield Case(f"answers:{name}:one-row", partial(one_row_is_refused, name, reason), True)
    for name in ("busy", "too_many", "error", "reset", "silent", "lost_copy", "queue_abort"):
        yield Case(f"answers:{name}:for-ever", partial(nothing_is_served, name), name != "silent")
    for ordinal in (0, 5, 11, 23):
        yield Case(f"poison:row:{ordinal}", partial(one_prompt_kills, ordinal), ordinal == 5)
    yield Case("poison:rows:5,6", two_prompts_kill, True)
    for step, nth in (
        ("request", 2), ("request", 12), ("copy", 3), ("shard-sync", 2), ("manifest-commit", 3),
        ("dump-unlink", 20), ("header-write", 1), ("seal-rename", 1), ("manifest-seal", 1),
    ):  # fmt: skip
        for names in (("INT",), ("TERM",), ("HUP",), ("INT", "INT"), ("TERM", "INT")):
            yield Case(
                f"signal:{'+'.join(names)}:{step}:{nth}",
                partial(interrupted, names, Fault(step=step, nth=nth)),
                step in ("copy", "seal-rename") and names != ("HUP",),
            )
    for step, nth in (("request", 12), ("copy", 3), ("dump-unlink", 20), ("seal-rename", 2)):
        fault = Fault(step=step, nth=nth, action="kill-server")
        yield Case(f"come-back:{step}:{nth}", partial(comes_back, fault), step == "copy")
    yield Case("come-back:poison", poison_with_a_supervisor, True)
    yield Case("two:runs:one-out", two_runs, True)
    yield Case("two:runs:one-server", two_outputs, True)
    yield Case("clock:back:a-year", clock_set_back, True)
    for kills in (2, 4):
        yield Case(f"restart:server:{kills}", partial(counters_begin_again, kills), kills == 2)

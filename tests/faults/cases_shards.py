"""Shards that somebody damages, and repairs that are cut off."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from faults.arena import Arena, read_json
from faults.cases import Case, must_end
from faults.steps import Fault

Damage = Callable[[list[Path], int], None]


def delete(shards: list[Path], at: int) -> None:
    shards[at].unlink()


def truncate(shards: list[Path], at: int) -> None:
    os.truncate(shards[at], shards[at].stat().st_size - 1500)


def lengthen(shards: list[Path], at: int) -> None:
    os.truncate(shards[at], shards[at].stat().st_size + 4)


def flip(place: Callable[[bytes], int], shards: list[Path], at: int) -> None:
    data = shards[at].read_bytes()
    flipped = bytearray(data)
    flipped[place(data)] ^= 1
    shards[at].write_bytes(flipped)


def zero(shards: list[Path], at: int) -> None:
    data = shards[at].read_bytes()
    shards[at].write_bytes(data[:-5000] + bytes(2000) + data[-3000:])


def empty(shards: list[Path], at: int) -> None:
    os.truncate(shards[at], 0)


def swap(shards: list[Path], at: int) -> None:
    other = shards[(at + 1) % len(shards)]
    one, two = shards[at].read_bytes(), other.read_bytes()
    shards[at].write_bytes(two)
    other.write_bytes(one)


DAMAGES: dict[str, Damage] = {
    "delete": delete,
    "truncate": truncate,
    "lengthen": lengthen,
    "empty": empty,
    "zero": zero,
    "swap": swap,
    "flip-length": partial(flip, lambda data: 0),
    "flip-header": partial(flip, lambda data: 40),
    "flip-first": partial(flip, lambda data: 8 + int.from_bytes(data[:8], "little")),
    "flip-last": partial(flip, lambda data: len(data) - 1),
    "flip-middle": partial(flip, lambda data: len(data) - 7000),
}


def sealed(arena: Arena) -> list[Path]:
    return sorted((arena.out / "shards").glob("shard-*"))


def damaged(name: str, at: int, arena: Arena, undisturbed: dict[int, str]) -> None:
    """Verify finds it, repair keeps what is sound, and the same command does the rest."""
    arena.start_server()
    assert arena.run().code == 0
    sent = len(arena.ordinals_sent())
    DAMAGES[name](sealed(arena), at)
    assert arena.command("verify", arena.out).code == 1
    ended = arena.command("verify", arena.out, "--repair", "--json")
    assert ended.code == 1, ended
    repair = read_json(ended)["repair"]
    assert repair["shards"] >= 1, repair
    ended = arena.run()
    assert ended.code == 0, ended
    arena.assert_whole(undisturbed)
    # What was sound is not sent again.
    assert len(arena.ordinals_sent()) - sent == repair["planned"] < arena.num_prompts


def repair_killed(fault: Fault, arena: Arena, undisturbed: dict[int, str]) -> None:
    """Kill -9 of a repair, then of the run behind it; then both again."""
    arena.start_server()
    assert arena.run().code == 0
    DAMAGES["flip-last"](sealed(arena), 1)
    must_end(arena.command("verify", arena.out, "--repair", plan=[fault]), -9)
    arena.run(plan=[Fault(step="shards-sync", when="after")])
    ended = arena.command("verify", arena.out, "--repair")
    assert ended.code in (0, 1), ended
    ended = arena.run()
    assert ended.code == 0, ended
    arena.assert_whole(undisturbed)


def damaged_while_open(name: str, arena: Arena, undisturbed: dict[int, str]) -> None:
    """A killed run's open shard loses bytes or changes: found at once, or by verify."""
    arena.start_server()
    must_end(arena.run("--shard-size", "4M", plan=[Fault(step="dump-unlink", nth=50)]), -9)
    opened = (arena.out / "shards").glob(".shard-*.open")  # one a mover
    shard = max(opened, key=lambda path: path.stat().st_size)
    if name == "truncate":
        os.truncate(shard, shard.stat().st_size // 2)
    elif name == "delete":
        shard.unlink()
    else:
        data = bytearray(shard.read_bytes())
        data[-9000] ^= 1
        shard.write_bytes(data)
    ended = arena.run()
    assert ended.code == 0, ended
    if arena.command("verify", arena.out).code == 1:
        arena.command("verify", arena.out, "--repair")
        assert arena.run().code == 0
    arena.assert_whole(undisturbed)


def cases() -> Iterator[Case]:
    for name in DAMAGES:
        for at in (0, 2):
            yield Case(f"shard:{name}:{at}", partial(damaged, name, at), at == 0)
    for step, nth in (
        ("shard-create", 1), ("shards-sync", 1), ("manifest-add-shard", 1), ("copy", 2),
        ("shard-sync", 1), ("manifest-commit", 1), ("shards-sync", 2), ("manifest-drop", 1),
        ("seal-trim", 1), ("header-write", 1), ("seal-rename", 1), ("manifest-seal", 1),
    ):  # fmt: skip
        for when in ("before", "after"):
            fault = Fault(step=step, when=when, nth=nth)
            yield Case(
                f"kill-repair:{step}:{when}:{nth}", partial(repair_killed, fault), when == "after"
            )
    for name in ("truncate", "delete", "flip"):
        yield Case(f"open-shard:{name}:1", partial(damaged_while_open, name), True)

"""Full, failing and read-only disks; dumps and shards that somebody damages."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial

from extractor.testing.faults import Fault as ServerFault
from faults.arena import Arena, as_if_large
from faults.cases import Case, must_end, resume
from faults.steps import WRITING, Fault

#: A disk of a few kilobytes is as good as any here.
SMALL_IS_ENOUGH = as_if_large(store={"min_free_bytes": 0})
AMPLE_BYTES = 256 << 20
#: What the operating system may say to a write, and what the command must end with then.
ERRORS = {"ENOSPC": 4, "EDQUOT": 4, "EIO": 4, "ESTALE": 4, "EROFS": 2, "EFBIG": 2, "EPROTO": 2}


# --- the output disk -----------------------------------------------------------------------------


def write_fails(fault: Fault, code: int, arena: Arena, undisturbed: dict[int, str]) -> None:
    """An operation on OUT fails, and goes on failing."""
    arena.start_server()
    ended = arena.run(plan=[fault])
    must_end(ended, code)
    assert "run the same command again" in ended.stderr, ended
    resume(arena, undisturbed, kills=1)


def out_fills(size_bytes: int, arena: Arena, undisturbed: dict[int, str]) -> None:
    """Shards and manifest share a disk that is too small; then it grows."""
    arena.mount(arena.out, size_bytes)
    fills(arena, undisturbed, lambda: arena.remount(arena.out, size_bytes=AMPLE_BYTES))


def shards_fill(size_bytes: int, arena: Arena, undisturbed: dict[int, str]) -> None:
    """Only the shards' disk is too small."""
    shards = arena.out / "shards"
    arena.mount(shards, size_bytes)
    fills(arena, undisturbed, lambda: arena.remount(shards, size_bytes=AMPLE_BYTES))


def manifest_fills(size_bytes: int, arena: Arena, undisturbed: dict[int, str]) -> None:
    """Only the manifest's disk is too small."""
    arena.mount(arena.out, size_bytes)
    arena.mount(arena.out / "shards", AMPLE_BYTES)
    fills(arena, undisturbed, lambda: arena.remount(arena.out, size_bytes=AMPLE_BYTES))


def fills(arena: Arena, undisturbed: dict[int, str], grow: Callable[[], None]) -> None:
    arena.start_server()
    ended = arena.run(timings=SMALL_IS_ENOUGH)
    assert ended.code == 4, ended
    assert "Traceback" not in ended.stderr, ended.stderr
    assert "run the same command again" in ended.stderr, ended
    # Still full: no better, no worse.
    assert arena.run(timings=SMALL_IS_ENOUGH).code == 4
    grow()
    resume(arena, undisturbed, kills=2)


def out_is_read_only(arena: Arena, undisturbed: dict[int, str]) -> None:
    """The disk was mounted read-only between two sessions."""
    arena.mount(arena.out, AMPLE_BYTES)
    arena.start_server()
    must_end(arena.run(plan=[Fault(step="dump-unlink", nth=20)], timings=SMALL_IS_ENOUGH), -9)
    arena.remount(arena.out, is_read_only=True)
    ended = arena.run(timings=SMALL_IS_ENOUGH)
    assert ended.code == 2, ended
    assert "Read-only" in ended.stderr, ended
    arena.remount(arena.out)
    resume(arena, undisturbed, kills=1)


# --- dumps ---------------------------------------------------------------------------------------


def dump_damaged(fault: Fault, arena: Arena, undisturbed: dict[int, str]) -> None:
    """A dump changes after it was seen and before it is copied: its prompt is sent again.

    The first dump is the probe's: then the run does not begin.
    """
    arena.start_server()
    ended = arena.run("--dump-timeout", 0.5, plan=[fault])
    is_probe = fault.nth == 1
    must_end(ended, 0, *([3] if is_probe else []))
    assert ended.code == 0 or "the dump of the probe prompt cannot be used" in ended.stderr, ended
    resume(arena, undisturbed, kills=1)


def shm_fills(nth: int, arena: Arena, undisturbed: dict[int, str]) -> None:
    """Somebody else fills the dump root in mid-run: no row is given up for that."""
    arena.mount(arena.root, 4 << 20)
    filler = arena.root / "somebody-elses"

    def fill(number: int, rid: str) -> ServerFault | None:
        if number >= nth:
            with open(filler, "ab", buffering=0) as file:
                try:
                    while True:
                        os.write(file.fileno(), bytes(4096))
                except OSError:
                    pass
        return None

    arena.start_server(faults=fill)
    # As in real time, the pause before a prompt is sent again is no fraction of the patience.
    timings = as_if_large(
        health={"space_patience_s": 0.3}, dispatch={"retry_base_s": 3.0, "retry_max_s": 3.0}
    )
    ended = arena.run("--dump-timeout", 0.2, timings=timings)
    assert ended.code == 4, ended
    assert str(arena.root) in ended.stderr, ended
    assert "p.jsonl:" not in ended.stderr, ended
    arena.stop_server()
    filler.unlink()
    arena.start_server()
    # Nothing was sent into the full root but what was under way when it filled, once more.
    resume(arena, undisturbed, kills=2)


def cases() -> Iterator[Case]:
    for step in WRITING:
        for name, code in ERRORS.items():
            for nth in (1, 2, 3) if not step.startswith("provenance") else (1,):
                fault = Fault(step=step, nth=nth, action=f"raise:{name}", is_lasting=True)
                is_main = name in ("ENOSPC", "EROFS") and nth == 1
                yield Case(
                    f"write-error:{step}:{name}:{nth}", partial(write_fails, fault, code), is_main
                )
    for size in (96, 128, 160, 192, 224):
        yield Case(f"full:out:{size}K", partial(out_fills, size << 10), size == 160)
    for size in (4, 24, 48, 96):
        yield Case(f"full:shards:{size}K", partial(shards_fill, size << 10), size == 48)
    for size in (8, 60, 96, 128):
        yield Case(f"full:manifest:{size}K", partial(manifest_fills, size << 10), size == 96)
    yield Case("read-only:out", out_is_read_only, True)
    for how in ("delete", "truncate", "empty", "zero", "flip", "nan", "swap"):
        for nth in (1, 5, 20, 60):
            fault = Fault(step="dump-seen", when="after", nth=nth, action=f"dump:{how}")
            yield Case(f"dump:{how}:seen:{nth}", partial(dump_damaged, fault), nth == 5)
    for nth in (2, 9, 20):
        yield Case(f"full:shm:{nth}", partial(shm_fills, nth), nth == 9)

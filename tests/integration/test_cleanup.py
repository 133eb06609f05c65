"""What dead servers left: removed by ownership, and nothing else is."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

import numpy as np
import pytest
from helpers import change_ready

from extractor.core.locations import DumpRoot
from extractor.pipeline.doctor import examine
from extractor.servers.cleanup import (
    find_leftovers,
    find_waiting,
    remove_leftovers,
    remove_useless,
)
from extractor.testing.fake_server import FakeServer
from server_patch.dump_format import READY_NAME, decode_ready, encode_ready


async def announced(dump_root: Path, *, num_dumps: int = 0, **changes: object) -> Path:
    """The directory of a server, with its dumps and another READY.json."""
    server = FakeServer(dump_root)
    async with server.running():
        for number in range(num_dumps):
            server.dump(f"xtr-run-session-{number}-1", np.arange(4, dtype=np.int32))
        path = server.directory / READY_NAME
        path.write_bytes(encode_ready(change_ready(decode_ready(path.read_bytes()), **changes)))
    return server.directory


DEAD = {"pid_start_ticks": 1}
FOREIGN = {"pid_start_ticks": 1, "pid_namespace": "pid:[1]"}


async def test_only_what_dead_servers_left_is_removed(dump_root: Path) -> None:
    alive = await announced(dump_root, num_dumps=2)
    dead = await announced(dump_root, num_dumps=3, **DEAD)
    foreign = await announced(dump_root, num_dumps=1, **FOREIGN)
    starting = dump_root / "boot" / "0"
    starting.mkdir(parents=True)
    (starting / ".tmp-READY.json").write_bytes(b"")
    found = {leftover.path: leftover for leftover in find_leftovers(DumpRoot(path=dump_root))}
    assert set(found) == {dead, starting}
    assert "3 dumps" in found[dead].what
    assert found[dead].size_bytes > 3 * 200
    assert "by hand" in found[starting].what
    assert [leftover.path for leftover in remove_leftovers(DumpRoot(path=dump_root))] == [dead]
    assert not dead.parent.exists()
    assert len(list(alive.iterdir())) == 3
    assert len(list(foreign.iterdir())) == 2
    assert starting.exists()


async def test_a_new_server_leaves_dumps_that_a_run_may_adopt(dump_root: Path) -> None:
    full = await announced(dump_root, num_dumps=1, **DEAD)
    empty = await announced(dump_root, **DEAD)
    remove_useless(DumpRoot(path=dump_root))
    assert full.exists()
    assert not empty.parent.exists()


@pytest.mark.parametrize(
    ("pid", "is_left"), [(os.getpid(), False), (2**22 + 1, True)], ids=["alive", "dead"]
)
def test_a_plugin_that_gave_up_is_cleaned_behind_when_its_server_is_dead(
    dump_root: Path, pid: int, is_left: bool
) -> None:
    directory = dump_root / "boot" / "0"
    directory.mkdir(parents=True)
    (directory / "FAILED.json").write_text(json.dumps({"reason": "r", "pid": pid}))
    assert [leftover.is_removable for leftover in find_leftovers(DumpRoot(path=dump_root))] == [
        True
    ] * is_left


def test_what_has_another_name_than_ours_is_no_leftover(dump_root: Path) -> None:
    for name in ("out/shards", ".hidden/0", "boot/00", "boot/-1", "boot/12345"):
        (dump_root / name).mkdir(parents=True)
    (dump_root / "link").symlink_to(dump_root / "boot")
    assert find_leftovers(DumpRoot(path=dump_root)) == []


@pytest.mark.parametrize("clean", [False, True])
async def test_doctor_lists_leftovers_and_removes_them_when_asked(
    tmp_path: Path, dump_root: Path, clean: bool
) -> None:
    dead = await announced(dump_root, num_dumps=1, **DEAD)
    lines = [
        check
        async for check in examine(
            url="http://127.0.0.1:9", dump_root=DumpRoot(path=dump_root), out=tmp_path / "out",
            server_wait_s=0, clean=clean,
        )
    ]  # fmt: skip
    (check,) = (check for check in lines if check.name == "leftovers")
    assert str(dead) in str(check)
    assert (check.problem is None) == clean
    assert dead.exists() != clean


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("is_beside_dead", [False, True])
async def test_doctor_notes_dumps_under_a_live_server_and_never_removes_them(
    tmp_path: Path, dump_root: Path, clean: bool, is_beside_dead: bool
) -> None:
    """Nothing proves that the run which asked for them is dead."""
    server = FakeServer(dump_root)
    async with server.running():
        for rid in ("xtr-aa11-s-1-1", "xtr-aa11-s-2-1", "xtr-bb22-s-1-1"):
            server.dump(rid, np.arange(4, dtype=np.int32))
        if is_beside_dead:
            await announced(dump_root, num_dumps=1, **DEAD)
        dumps = sorted(server.directory.glob("*.safetensors"))
        assert len(dumps) == 3
        found = find_waiting(DumpRoot(path=dump_root))
        assert [(run.directory, run.run_id, run.num_dumps) for run in found] == [
            (server.directory, "aa11", 2),
            (server.directory, "bb22", 1),
        ]
        assert sum(run.size_bytes for run in found) == sum(p.stat().st_size for p in dumps)
        checks = [
            check
            async for check in examine(
                url="http://127.0.0.1:9", dump_root=DumpRoot(path=dump_root), out=tmp_path / "out",
                server_wait_s=0, clean=clean,
            )
        ]  # fmt: skip
        (check,) = (check for check in checks if check.name == "leftovers")
        assert f"{server.directory} (under a live server: 2 dumps of the run aa11" in str(check)
        assert "1 dump of the run bb22" in str(check)
        assert "end the server and use --clean" in str(check)
        assert (check.problem is None) == (clean or not is_beside_dead)
        assert sorted(server.directory.glob("*.safetensors")) == dumps


async def test_doctor_lists_unused_files_in_shared_memory_without_a_problem(
    tmp_path: Path, dump_root: Path
) -> None:
    path = Path("/dev/shm") / f"sgl_shm_mq_{secrets.token_hex(8)}"
    path.write_bytes(bytes(1000))
    try:
        checks = [
            check
            async for check in examine(
                url="http://127.0.0.1:9", dump_root=DumpRoot(path=dump_root), out=tmp_path / "out",
                server_wait_s=0, clean=True,
            )
        ]  # fmt: skip
        (check,) = (check for check in checks if check.name == "leftovers")
        assert check.problem is None
        assert "that no process here uses" in check.detail
        assert "remove them by hand" in check.detail
        assert path.exists()
    finally:
        path.unlink()

"""Who is alive under a dump root, and whose files may be removed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from extractor.errors import PluginError
from extractor.testing import FakeServer
from extractor.writers import is_alive, ranks_of, scan_writers
from server_patch.dump_format import READY_NAME, Ready, decode_ready, encode_ready


async def announced(dump_root: Path) -> tuple[Path, Ready]:
    server = FakeServer(dump_root)
    async with server.running():
        path = server.directory / READY_NAME
        return path, decode_ready(path.read_bytes())


async def test_a_process_is_alive_by_pid_and_start_time(dump_root: Path) -> None:
    _, ready = await announced(dump_root)
    assert is_alive(ready)
    assert not is_alive(replace(ready, pid_start_ticks=ready.pid_start_ticks + 1))
    assert not is_alive(replace(ready, pid=2**22 + 1))


async def test_a_process_of_another_pid_namespace_cannot_be_called_dead(dump_root: Path) -> None:
    _, ready = await announced(dump_root)
    dead = replace(ready, pid_start_ticks=1, pid_namespace=os.readlink("/proc/self/ns/pid"))
    assert not is_alive(dead)
    assert is_alive(replace(dead, pid_namespace="pid:[1]"))


async def test_a_dead_server_is_told_from_one_that_never_was(dump_root: Path) -> None:
    with pytest.raises(PluginError, match="has no plugin"):
        ranks_of(scan_writers(dump_root), url="http://127.0.0.1:1", model_path="m")
    path, ready = await announced(dump_root)
    path.write_bytes(encode_ready(replace(ready, pid_start_ticks=1)))
    with pytest.raises(PluginError, match=f"are dead .pid {ready.pid}"):
        ranks_of(scan_writers(dump_root), url="http://127.0.0.1:1", model_path="m")

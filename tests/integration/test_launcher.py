"""`running_server()` with stand-ins for SGLang: each stage, each way to get stuck or die."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import extractor.servers.launcher
from extractor.core.errors import (
    BadDumpDir,
    MissingExtra,
    PluginError,
    ServerError,
    UsageError,
    exit_code,
)
from extractor.core.timings import DEFAULT_TIMINGS, StopTimings, Timings
from extractor.servers.client import Client
from extractor.servers.launcher import StartStage, free_port, running_server
from extractor.servers.sglang_flags import EngineOptions, PluginOptions, ServeOptions
from extractor.system.process_tree import ServerProcess

#: A server that comes up: the fake one, which says of its weights what SGLang says.
GOOD = """
import sys
print("Load weight end. elapsed=1 s", flush=True)
from extractor.testing.__main__ import main
sys.argv = ["testing", "--dump-root", {root!r}, "--port", "{port}"]
main()
"""
#: One whose plugin gives up.
REFUSED = """
import asyncio, os, pathlib, sys
print("Load weight end", flush=True)
directory = pathlib.Path({root!r}) / os.environ["SGLANG_HS_BOOT_ID"] / "0"
directory.mkdir(parents=True)
(directory / "FAILED.json").write_text('{{"reason": "this model cannot"}}')
os.environ["SGLANG_HS_BOOT_ID"] = "another"
from extractor.testing.__main__ import main
sys.argv = ["testing", "--dump-root", {root!r} + "-else", "--port", "{port}"]
main()
"""
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
time.sleep(600)
"""
STUCK = "import time; print('loading shard 3 of 9', flush=True); time.sleep(600)"
DEAD = "print('CUDA out of memory'); raise SystemExit(7)"
FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def any_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extractor.servers.launcher, "_engine_version", lambda: "0.5.23")


def options_for(
    script: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stall_s: float = 120.0
) -> ServeOptions:
    options = ServeOptions(
        engine=EngineOptions(model="m", port=free_port()),
        plugin=PluginOptions(dump_root=root),
        log_path=tmp_path / "log",
        stall_s=stall_s,
    )
    text = script.format(root=str(root), port=options.engine.port) if "{" in script else script
    monkeypatch.setattr(
        EngineOptions, "command", lambda self, python, engine_version: [sys.executable, "-c", text]
    )
    return options


async def test_a_server_passes_every_stage_and_is_gone_after_the_block(
    dump_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    options = options_for(GOOD, dump_root, tmp_path, monkeypatch)
    async with running_server(options, report=notes.append) as server:
        told = "\n".join(notes)
        assert [stage for stage in StartStage if stage.title in told] == list(StartStage)
        assert server.target.ready.boot_id.count("-") == 2  # the one that we named
        async with Client(server.url, concurrency=1, request_timeout_s=5) as client:
            assert await client.is_answering()
    assert server.process.exit_status is not None
    assert list(dump_root.iterdir()) == []


@pytest.mark.parametrize("kind", ["pipe", "endless"])
async def test_a_start_is_not_held_up_by_what_is_no_file(
    dump_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    planted = dump_root / "evil" / "0" / "READY.json"
    planted.parent.mkdir(parents=True)
    if kind == "pipe":
        os.mkfifo(planted)
    else:
        planted.symlink_to("/dev/zero")
    options = options_for(GOOD, dump_root, tmp_path, monkeypatch)
    async with running_server(options, report=lambda _: None):
        pass
    assert os.listdir(dump_root) == ["evil"]


async def test_a_root_that_others_can_change_is_refused_before_anything_is_started(
    dump_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chmod(dump_root, 0o770)
    options = options_for(DEAD, dump_root, tmp_path, monkeypatch)
    with pytest.raises(BadDumpDir, match="can be changed by its group"):
        async with running_server(options, report=lambda _: None):
            pass
    shared = replace(options, plugin=replace(options.plugin, file_mode="660"))
    with pytest.raises(ServerError, match="status 7"):
        async with running_server(shared, report=lambda _: None):
            pass


async def test_a_stall_names_the_stage_the_last_line_and_what_to_try(
    dump_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_for(STUCK, dump_root, tmp_path, monkeypatch, stall_s=0.3)
    stalled = asyncio.Event()
    notes: list[str] = []

    def note(message: str) -> None:
        notes.append(message)
        if "stalled" in message:
            stalled.set()

    async def start() -> None:
        async with running_server(options, report=note):
            raise AssertionError("it cannot be up")

    task = asyncio.create_task(start())
    await stalled.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (message,) = [note for note in notes if "stalled" in note][:1]
    assert "since 'log growing'" in message
    assert "loading shard 3 of 9" in message
    assert StartStage.LOGGING.advice in message


async def test_a_server_that_dies_is_reported_with_the_end_of_its_log(
    dump_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_for(DEAD, dump_root, tmp_path, monkeypatch)
    with pytest.raises(ServerError, match=r"(?s)status 7.*CUDA out of memory"):
        async with running_server(options, report=lambda _: None):
            pass


async def test_a_plugin_that_gives_up_ends_the_start_with_its_reason(
    dump_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_for(REFUSED, dump_root, tmp_path, monkeypatch)
    with pytest.raises(PluginError, match="this model cannot"):
        async with running_server(options, report=lambda _: None):
            pass
    assert list(dump_root.iterdir()) == []


async def start(
    options: ServeOptions, log: Path, timings: Timings = DEFAULT_TIMINGS
) -> tuple[asyncio.Task[None], psutil.Process]:
    """Begin to run a server that never comes up; its child, whose pid the log tells second."""
    logged = asyncio.Event()

    async def run() -> None:
        async with running_server(
            options,
            report=lambda text: logged.set() if "log growing" in text else None,
            timings=timings,
        ):
            raise AssertionError("it cannot be up")

    task = asyncio.create_task(run())
    await logged.wait()
    return task, psutil.Process(int(log.read_text().split()[1]))


async def test_the_whole_process_tree_ends_with_the_block(
    dump_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_for(FAMILY, dump_root, tmp_path, monkeypatch)
    timings = Timings(stop=StopTimings(server_s=0.5))
    task, child = await start(options, tmp_path / "log", timings)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


async def test_a_second_interrupt_ends_a_stubborn_tree_by_force(
    dump_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_for(STUBBORN, dump_root, tmp_path, monkeypatch)
    stopping = asyncio.Event()
    really_stop = ServerProcess.stop

    async def stop(self: ServerProcess) -> None:
        stopping.set()
        await really_stop(self)

    monkeypatch.setattr(ServerProcess, "stop", stop)

    task, child = await start(options, tmp_path / "log")
    task.cancel()
    await stopping.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task  # at once: the politeness of 15 seconds would outlast the test's patience
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


async def test_a_taken_port_is_refused_before_anything_is_started(
    dump_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_for(GOOD, dump_root, tmp_path, monkeypatch)
    listener = await asyncio.start_server(
        lambda reader, writer: writer.close(), "127.0.0.1", options.engine.port
    )
    try:
        with pytest.raises(UsageError, match="--port"):
            async with running_server(options, report=lambda _: None):
                pass
    finally:
        listener.close()
        await listener.wait_closed()
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("file", "cannot be made .Not a directory.. Name another"),
        ("link", "is a link to nowhere"),
        ("loop", "loop"),
    ],
)
async def test_an_invalid_dump_dir_is_refused_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    options = options_for(GOOD, tmp_path / name, tmp_path, monkeypatch)
    with pytest.raises((UsageError, OSError), match=words) as refused:
        async with running_server(options, report=lambda _: None):
            pass
    assert exit_code(refused.value) == 2
    assert not (tmp_path / "log").exists()


async def test_without_sglang_the_exact_pip_line_is_printed(
    dump_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> str:
        raise MissingExtra(command="extractor serve", extra="server", package="sglang")

    options = options_for(GOOD, dump_root, tmp_path, monkeypatch)
    monkeypatch.setattr(extractor.servers.launcher, "_engine_version", missing)
    with pytest.raises(MissingExtra, match=r"pip install 'hidden-state-extractor\[server\]'"):
        async with running_server(options, report=lambda _: None):
            pass


async def test_a_server_killed_by_somebody_else_is_noticed(
    dump_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_for(GOOD, dump_root, tmp_path, monkeypatch)
    async with running_server(options, report=lambda _: None) as server:
        os.kill(server.process.pid, signal.SIGKILL)
        assert await server.process.wait() == -signal.SIGKILL

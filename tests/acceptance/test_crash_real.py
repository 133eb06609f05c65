"""The end of the client, of a real SGLang server, and of both: kill -9, or told to end."""

from __future__ import annotations

import random
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest
from helpers import dumps_under, make_prompts, write_prompts

from acceptance.real import Real, assert_same, real_server, stored
from acceptance.tool import Tool, wait_until
from extractor.core.errors import ServerGone
from extractor.servers.launcher import free_port

pytestmark = [pytest.mark.sglang, pytest.mark.crash, pytest.mark.timeout(240)]

NUM_ROWS = 60


def kill_moment(process: subprocess.Popen[str], out: Path, goal: int, server: Real) -> None:
    wait_until(
        lambda: (
            (stored(out) >= goal and bool(dumps_under(server.root))) or process.poll() is not None
        ),
        what=f"{goal} rows stored and a dump on its way",
    )


def test_a_run_killed_at_ten_moments_ends_as_an_undisturbed_one(
    tmp_path: Path, tool: Tool, real: Real
) -> None:
    prompts = make_prompts(NUM_ROWS, longest=120, vocabulary=500)
    path = write_prompts(tmp_path / "p.jsonl", prompts)
    calm, out = tmp_path / "calm", tmp_path / "out"
    assert tool.run(path, calm, real).returncode == 0
    chance = random.Random(7)
    for goal in [0, *sorted(chance.sample(range(1, NUM_ROWS), 9))]:
        process = tool.start_run(path, out, real)
        kill_moment(process, out, goal, real)
        process.kill()
        process.communicate()
    final = tool.run(path, out, real)
    assert final.returncode == 0, final.stderr
    assert_same(calm, out, prompts)
    assert tool("verify", out).returncode == 0
    assert dumps_under(real.root) == []


@pytest.mark.timeout(500)
def test_a_server_that_is_killed_and_started_again_ends_as_an_undisturbed_one(
    tmp_path: Path, tool: Tool
) -> None:
    """The server alone, then client and server at once; a new boot id and counters from 0 each."""
    prompts = make_prompts(NUM_ROWS, longest=120, vocabulary=500)
    path = write_prompts(tmp_path / "p.jsonl", prompts)
    calm, out = tmp_path / "calm", tmp_path / "out"
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="acceptance-", dir="/dev/shm") as directory:
        root = Path(directory)
        with real_server(tmp_path, root=root, port=port) as server:
            process = tool.start_run(path, out, server)
            kill_moment(process, out, 10, server)
            (ready,) = root.glob("*/*/READY.json")
            modes = [stat.S_IMODE(p.stat().st_mode) for p in (ready, *ready.parents[:2])]
            assert modes == [0o600, 0o700, 0o700]
            server.kill()
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 3, errors
            assert "run the same command again" in errors
        with real_server(tmp_path, root=root, port=port) as server:
            process = tool.start_run(path, out, server)
            kill_moment(process, out, 30, server)
            process.kill()
            server.kill()
            process.communicate()
        assert 30 <= stored(out) < NUM_ROWS
        with real_server(tmp_path, root=root, port=port) as server:
            final = tool.run(path, out, server)
            assert final.returncode == 0, final.stderr
            assert tool.run(path, calm, server).returncode == 0
        assert_same(calm, out, prompts)
        assert tool("verify", out).returncode == 0
        assert dumps_under(root) == []
        assert list(root.rglob(".tmp-*")) == []


def test_a_server_that_is_told_to_end_in_mid_run_ends(tmp_path: Path, tool: Tool) -> None:
    """It takes prompts for as long as it gets them: the run must stop sending, and says why."""
    prompts = make_prompts(6000, longest=120, vocabulary=500)
    path = write_prompts(tmp_path / "p.jsonl", prompts)
    out = tmp_path / "out"
    with real_server(tmp_path) as server:
        running = tool.start_run(path, out, server)
        wait_until(lambda: stored(out) >= 20 or running.poll() is not None, what="20 rows stored")
        server.process.terminate()
        _, stderr = running.communicate(timeout=120)
        assert running.returncode == ServerGone.exit_code, stderr
        assert f"{server.url} is shutting down; not sending new prompts" in stderr
        assert f"the server at {server.url} was stopped: its process" in stderr
        server.process.wait(60)
        assert 20 <= stored(out) < len(prompts)
        assert dumps_under(server.root) == []

"""Two real servers in one run: one is killed in mid-run, started again, and used again."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from helpers import dumps_under, make_prompts, write_prompts

from acceptance.real import assert_same, real_server, stored
from acceptance.tool import Tool, wait_until
from extractor.servers.launcher import free_port

pytestmark = [pytest.mark.sglang, pytest.mark.crash, pytest.mark.timeout(500)]

NUM_ROWS = 400
#: More than the servers have answered and is not stored yet when both fall silent.
MORE_ROWS = 60


def test_a_server_that_is_killed_and_started_again_is_used_again_and_no_row_is_lost(
    tmp_path: Path, tool: Tool
) -> None:
    """The other one is paused meanwhile, so that rows are left for the one that returns."""
    prompts = make_prompts(NUM_ROWS, longest=120, vocabulary=500)
    path = write_prompts(tmp_path / "p.jsonl", prompts)
    out, calm = tmp_path / "out", tmp_path / "calm"
    port = free_port()
    with (
        tempfile.TemporaryDirectory(prefix="acceptance-", dir="/dev/shm") as directory,
        real_server(tmp_path, root=Path(directory), name="other") as other,
    ):
        with real_server(tmp_path, root=other.root, port=port) as first:
            running = tool.start_run(path, out, first, "--server", other.url, "--json")
            wait_until(
                lambda: stored(out) >= 40 or running.poll() is not None, what="40 rows stored"
            )
            assert running.poll() is None, running.communicate()
            other.pause()
            first.kill()
            before = stored(out)
        with real_server(tmp_path, root=other.root, port=port) as again:
            wait_until(
                lambda: stored(out) >= before + MORE_ROWS or running.poll() is not None,
                what="rows of the server that returned",
            )
            other.go_on()
            stdout, stderr = running.communicate(timeout=120)
            assert running.returncode == 0, stderr
            assert tool.run(path, calm, again).returncode == 0
        assert "died: its process" in stderr
        assert f"{again.url} passed the probe; resuming" in stderr
        summary = json.loads(stdout)
        assert summary["rows"]["stored"] == NUM_ROWS
        starts = [
            [start["prompts"] for start in server["starts"]]
            for server in summary["session"]["servers"]
        ]
        assert [len(prompts) for prompts in starts] == [2, 1]
        assert min(starts[0] + starts[1]) > 0, starts
        assert sum(starts[0] + starts[1]) == NUM_ROWS
        assert_same(calm, out, prompts)
        verified = tool("verify", out)
        assert verified.returncode == 0, verified.stdout
        assert dumps_under(other.root) == []

"""The real command line, killed with SIGKILL again and again: nothing is lost, nothing twice.

Moments are events (the n-th dump that appears, the n-th row that is stored), never times.
"""

from __future__ import annotations

import random
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import (
    assert_whole,
    dumps_under,
    make_prompts,
    read_samples,
    stored_ordinals,
    write_prompts,
)

from acceptance.tool import Fake, Result, Tool, fake_server, wait_until
from extractor.core.locations import MANIFEST_NAME
from manifest.exceptions import ManifestError

pytestmark = [pytest.mark.crash, pytest.mark.timeout(120)]

NUM_ROWS = 150
SEED = 20


def stored(out: Path) -> int:
    if not (out / MANIFEST_NAME).exists():
        return 0
    try:
        return len(stored_ordinals(out))
    except ManifestError:  # not begun yet
        return 0


def adopted(result: Result) -> int:
    """Rows whose dumps an earlier session had left whole."""
    found = re.search(r"^(\d+) prompts had their dumps from an earlier", result.stderr, re.M)
    return int(found[1]) if found else 0


def files(directory: Path, pattern: str) -> int:
    return len(list(directory.glob(pattern)))


@pytest.fixture
def slow_fake(dump_root: Path) -> Iterator[Fake]:
    with fake_server(dump_root, "--delay-s", "0.02", "--chunk-tokens", "16") as server:
        yield server


def has_stored(out: Path, num_rows: int) -> Callable[[], bool]:
    return lambda: stored(out) >= num_rows


def moments(server: Fake, out: Path, seed: int) -> list[tuple[str, Callable[[], bool]]]:
    """Ten moments of a run, in the order in which they come."""
    chance = random.Random(seed)
    rows = sorted(chance.sample(range(1, NUM_ROWS - 10), 7))
    found: list[tuple[str, Callable[[], bool]]] = [
        ("the manifest appears", lambda: (out / MANIFEST_NAME).exists()),
        ("the first dump appears", lambda: bool(dumps_under(server.root))),
    ]
    found += [(f"{row} rows are stored", has_stored(out, row)) for row in rows]
    found.append(("a shard is sealed", lambda: files(out / "shards", "shard-*") > 0))
    return found


def await_moment(process: subprocess.Popen[str], has_come: Callable[[], bool], moment: str) -> None:
    wait_until(lambda: has_come() or process.poll() is not None, what=moment)


def test_a_run_killed_at_ten_moments_ends_as_an_undisturbed_one(
    tmp_path: Path, tool: Tool, slow_fake: Fake
) -> None:
    prompts = make_prompts(NUM_ROWS)
    path = write_prompts(tmp_path / "p.jsonl", prompts)
    calm, out = tmp_path / "calm", tmp_path / "out"
    assert tool.run(path, calm, slow_fake).returncode == 0
    kills = 0
    sent_before = slow_fake.requests()
    for moment, has_come in moments(slow_fake, out, SEED):
        before = stored(out)
        process = tool.start_run(path, out, slow_fake, "--shard-size", "150K")
        await_moment(process, has_come, moment)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
            kills += 1
        else:
            assert process.returncode == 0, process.communicate()
        process.communicate()
        assert stored(out) >= before
    final = tool.run(path, out, slow_fake, "--shard-size", "150K", "--json")
    assert final.returncode == 0, final.stderr
    assert kills >= 9
    undisturbed, survived = read_samples(calm), read_samples(out)
    assert {n: sample.digest for n, sample in survived.items()} == {
        n: sample.digest for n, sample in undisturbed.items()
    }
    assert_whole(out, prompts)
    assert dumps_under(slow_fake.root) == []
    # A kill costs what was in flight (16 tasks at most, and a probe each session), no more.
    assert slow_fake.requests() - sent_before <= NUM_ROWS + (kills + 2) * (2 * 8 + 1)
    assert tool("verify", out).returncode == 0


def test_nothing_that_is_stored_is_sent_again_after_a_kill(
    tmp_path: Path, tool: Tool, slow_fake: Fake
) -> None:
    prompts = make_prompts(NUM_ROWS, seed=3)
    path = write_prompts(tmp_path / "p.jsonl", prompts)
    out = tmp_path / "out"
    process = tool.start_run(path, out, slow_fake)
    wait_until(lambda: stored(out) >= 60, what="60 rows stored")
    process.kill()
    process.communicate()
    kept = stored_ordinals(out)
    before = slow_fake.requests()
    result = tool.run(path, out, slow_fake, "--json")
    assert result.returncode == 0
    # One probe, and each row that was not stored, once; or not even that where its dump was whole.
    assert slow_fake.requests() - before == 1 + NUM_ROWS - len(kept) - adopted(result)
    assert result.json()["session"]["stored"] == NUM_ROWS - len(kept)
    assert_whole(out, prompts)
    assert dumps_under(slow_fake.root) == []


def test_a_server_killed_in_mid_run_leaves_rows_resumable(
    tmp_path: Path, tool: Tool, dump_root: Path
) -> None:
    prompts = make_prompts(NUM_ROWS)
    path = write_prompts(tmp_path / "p.jsonl", prompts)
    out = tmp_path / "out"
    with fake_server(dump_root, "--delay-s", "0.02") as server:
        process = tool.start_run(path, out, server)
        wait_until(lambda: stored(out) >= 40, what="40 rows stored")
        server.process.kill()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 3, errors
    assert "run the same command again" in errors
    assert "Traceback" not in errors
    kept = stored(out)
    assert 40 <= kept < NUM_ROWS
    status = tool("status", out, "--json").json()
    assert status["rows"]["failed"] == 0
    with fake_server(dump_root) as server:
        result = tool.run(path, out, server)
        assert result.returncode == 0
        assert server.requests() == 1 + NUM_ROWS - kept - adopted(result)
    assert_whole(out, prompts)

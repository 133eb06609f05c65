"""After one signal a run ends by itself, even if a disk or a server hangs, before a scheduler kills
it.

These tests shorten the product's timeouts; a separate test checks that their sum fits.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import assert_whole, dumps_under, make_prompts, stored_ordinals, write_prompts

from acceptance.tool import Tool, fake_server, run_arguments, wait_until
from extractor.core.timings import DEFAULT_TIMINGS

pytestmark = [pytest.mark.crash, pytest.mark.timeout(120)]

#: `extractor` with short timeouts, and with a disk that hangs at the 4th write to a shard.
DRIVER = """
import fcntl, os, sys, threading
from extractor.cli.main import main
from extractor.core.timings import ClientTimings, CollectTimings, StopTimings, Timings

real, count = os.pwrite, 0

def pwrite(descriptor, data, offset):
    global count
    count += "/.shard-" in os.readlink(f"/proc/self/fd/{{descriptor}}")
    if {stuck} and count >= 4:
        print("the disk stands still", file=sys.stderr, flush=True)
        threading.Event().wait()
    return real(descriptor, data, offset)

def end(status, end=os._exit):
    out = sys.argv[sys.argv.index("--out") + 1]
    try:
        fcntl.flock(os.open(f"{{out}}/.lock", os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("locked to the end", file=sys.stderr, flush=True)
    end(status)

os.pwrite, os._exit = pwrite, end
main(
    Timings(
        stop=StopTimings(end_s={end_s}, drain_s=0.3),
        client=ClientTimings(abort_s=0.3),
        collect=CollectTimings(late_dumps_s=0.3),
    )
)
"""


def start(tool: Tool, *arguments: object, stuck: bool, end_s: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER.format(stuck=stuck, end_s=end_s), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tool.cwd,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    tool.started.append(process)
    return process


def test_the_steps_after_a_signal_add_up_to_less_than_20_seconds() -> None:
    timings, stop = DEFAULT_TIMINGS, DEFAULT_TIMINGS.stop
    assert stop.end_s + stop.log_s < 20
    # Requests in flight, aborts to a silent server, and late dumps; then the last writes of
    # manifest and shards, or killing our own server.
    orderly = stop.drain_s + timings.client.abort_s + timings.collect.late_dumps_s
    assert orderly + stop.kill_s <= stop.end_s


def test_a_hanging_disk_does_not_delay_the_end_of_a_run(
    tmp_path: Path, tool: Tool, dump_root: Path
) -> None:
    prompts = make_prompts(60)
    path, out = write_prompts(tmp_path / "p.jsonl", prompts), tmp_path / "out"
    with fake_server(dump_root, "--delay-s", "0.02") as fake:
        process = start(tool, *run_arguments(path, out, fake), stuck=True, end_s=2.0)
        assert process.stderr is not None
        assert next(line for line in process.stderr if "stands still" in line)
        process.send_signal(signal.SIGTERM)
        assert next(line for line in process.stderr if "interrupt again" in line)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130, errors
        assert "ended 2 s after the signal, with work in progress" in errors
        # The directory stays locked while the run's thread may still write.
        assert errors.endswith("locked to the end\n")
        assert "Traceback" not in errors
        assert tool.run(path, out, fake).returncode == 0
    assert_whole(out, prompts)


@pytest.mark.parametrize("is_frozen", [False, True], ids=["silent", "frozen"])
def test_a_silent_server_does_not_delay_the_end_of_a_run(
    tmp_path: Path, tool: Tool, dump_root: Path, is_frozen: bool
) -> None:
    prompts = make_prompts(20)
    path, out = write_prompts(tmp_path / "p.jsonl", prompts), tmp_path / "out"
    with fake_server(dump_root, "--fault", "silent", "--fault-every", "3") as fake:
        # The process would be killed only after an hour: it must exit cleanly before.
        process = start(tool, *run_arguments(path, out, fake), stuck=False, end_s=3600.0)
        wait_until(lambda: fake.requests() >= 6, what="silent requests")
        if is_frozen:
            fake.process.send_signal(signal.SIGSTOP)  # it does not answer aborts either
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        fake.process.send_signal(signal.SIGCONT)
        assert process.returncode == 130, errors
        assert "Traceback" not in errors
        assert is_frozen or dumps_under(dump_root) == []  # it may freeze while writing a dump
        assert len(stored_ordinals(out)) < 20
    with fake_server(dump_root) as fake:
        assert tool.run(path, out, fake).returncode == 0
    assert_whole(out, prompts)

"""What a disk slower than the server does to a run: the server is throttled, and nothing else.

    python -m benchmarks.slow_disk --server URL --dump-dir DIR --out DIR

The same prompts twice against one server: onto the disk as it is, then as if it took only a share
of the bytes a second that the first run stored. The limit is in the client's fdatasync, which then
takes as long as a disk of that speed takes for what the file grew by since the last one. Dumps
under the dump root are measured from outside, 20 times a second; what is in flight is what
`.live.json` says.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.command import (
    add_server,
    child,
    command_parser,
    directory,
    number_from,
    run_arguments,
    run_command,
    session_of,
)
from benchmarks.load import prompts_for
from benchmarks.sinks import write_prompts
from extractor.status.live_file import read_live

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

LOOK_S = 0.05


@dataclass
class Seen:
    """What was seen of a run from outside."""

    peak_bytes: int = 0  # of dumps under the dump root
    in_flight: list[int] = field(default_factory=list)  # once a second
    budget_bytes: int = 0
    longest_pause_s: float = 0.0  # between two looks at `.live.json` with more samples stored
    _stored: int = -1
    _stored_at: float = 0.0

    def look(self, dump_root: Path, out: Path) -> None:
        self.peak_bytes = max(self.peak_bytes, lying_bytes(dump_root))
        live = read_live(out)
        if live is None:
            return
        session, now = live.session, time.monotonic()
        self.budget_bytes = session["now"]["budget_bytes"]
        if session["stored"] > self._stored:
            if self._stored > 0:
                self.longest_pause_s = max(self.longest_pause_s, now - self._stored_at)
            self._stored, self._stored_at = session["stored"], now
            self.in_flight.append(session["now"]["in_flight"])

    def over_time(self) -> str:
        """What takes several looks at `.live.json`, which is written once a second."""
        flight = self.in_flight[1:-1]  # without the first and the last moments
        if not flight:
            return "too short a run for what is in flight, and for pauses: give more --prompts"
        return (
            f"in flight {statistics.median(flight):.0f} at the median, {max(flight)} at most; "
            f"longest pause between samples {self.longest_pause_s:.1f} s"
        )


def lying_bytes(dump_root: Path) -> int:
    """Bytes of dumps, whole or not."""
    total = 0
    for path in dump_root.glob("*/*/*.safetensors"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue  # removed meanwhile, as it should be
    return total


def client(rate_bytes_per_s: float, arguments: Sequence[str]) -> None:
    """`extractor ARGUMENTS` with a slow disk, in this process."""
    from extractor.__main__ import main as extractor

    synced: dict[int, int] = {}
    free_at = 0.0
    fdatasync, lock = os.fdatasync, threading.Lock()

    def slow(fd: FileDescriptorLike) -> None:
        nonlocal free_at
        descriptor = fd if isinstance(fd, int) else fd.fileno()
        status = os.fstat(descriptor)
        size = status.st_size
        fdatasync(descriptor)
        with lock:  # one disk for all threads
            new = max(0, size - synced.get(status.st_ino, 0))
            synced[status.st_ino] = size
            free_at = max(free_at, time.monotonic()) + new / rate_bytes_per_s
            until = free_at
        time.sleep(max(0.0, until - time.monotonic()))

    os.fdatasync = slow
    sys.argv = ["extractor", *arguments]
    extractor()


def run(
    options: argparse.Namespace, prompts: Path, out: Path, *, rate_bytes_per_s: float = 1e15
) -> tuple[dict[str, Any], Seen]:
    """One `extractor run`; its session, and what was seen of it."""
    seen = Seen()
    with child(
        [
            sys.executable, "-m", "benchmarks.slow_disk", "--as-client", str(rate_bytes_per_s),
            *run_arguments(
                prompts, out=out, server=options.server, dump_root=options.dump_dir
            ),
            "--shm-budget", options.budget, "--concurrency", str(options.concurrency),
        ]
    ) as process:  # fmt: skip
        while process.poll() is None:
            seen.look(options.dump_dir, out)
            time.sleep(LOOK_S)
        assert process.stdout is not None
        return session_of(process.stdout.read(), process.returncode), seen


def show(name: str, session: dict[str, Any], seen: Seen) -> None:
    stages = session["stages"]
    print(
        f"{name}: {session['bytes'] / session['seconds'] / 1e6:.2f} MB/s, "
        f"{session['tokens_per_s']:,.0f} tok/s, {session['stored']} stored, "
        f"{session['retried']} sent again\n"
        f"  dumps at most {seen.peak_bytes / 1e6:.2f} MB of {seen.budget_bytes / 1e6:.2f} MB "
        f"allowed; {seen.over_time()}\n"
        "  a dump lay there "
        f"{stages['residency']['p50_ms']:.0f} ms p50, {stages['residency']['p99_ms']:.0f} ms p99\n"
        f"  syncs {stages['sync']['count']}, {stages['sync']['p50_ms']:.0f} ms p50",
        flush=True,
    )


def main() -> None:
    if sys.argv[1:2] == ["--as-client"]:
        client(float(sys.argv[2]), sys.argv[3:])
        return
    parser = command_parser(__doc__, __file__)
    add_server(parser)
    parser.add_argument("--out", type=directory, required=True, help="a directory on a disk")
    parser.add_argument("--prompts", type=number_from(1), default=200, help="in each run")
    parser.add_argument("--prompt-tokens", type=number_from(1), default=128, help="of each")
    parser.add_argument("--budget", default="8M", help="of /dev/shm, as of `--shm-budget`")
    parser.add_argument("--concurrency", type=number_from(1), default=64, help="requests at once")
    parser.add_argument("--share", type=float, default=0.3, help="of the first run's speed")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="slow-disk-", dir=options.out))
    try:
        prompts = work / "prompts.jsonl"
        write_prompts(
            prompts,
            prompts_for(options.dump_dir, options.prompts, num_tokens=options.prompt_tokens),
        )
        session, seen = run(options, prompts, work / "fast")
        show("the disk as it is", session, seen)
        rate = options.share * session["bytes"] / session["seconds"]
        session, seen = run(options, prompts, work / "slow", rate_bytes_per_s=rate)
        show(f"a disk of {rate / 1e6:.2f} MB/s", session, seen)
        print(f"ratio to that disk {session['bytes'] / session['seconds'] / rate:.3f}")
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    run_command(main)

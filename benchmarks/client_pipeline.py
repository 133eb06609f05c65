"""The client alone, from HTTP to sealed shards, against `cp` of the same bytes to the same place.

    python -m benchmarks.client_pipeline --out DIR         # 64 prompts of 2,048 tokens, 32 MB each
    python -m benchmarks.client_pipeline --out DIR --prompts 20000 --prompt-tokens 64 \\
        --hidden-size 64                                   # what a sample costs by itself
    python -m benchmarks.client_pipeline --out DIR --null  # without a disk
    python -m benchmarks.client_pipeline --out DIR --prompts 1000000 --prompt-tokens 4 \\
        --hidden-size 16 --rounds 1                        # memory by prompts stored

A generator (generator.py) publishes dumps as fast as it can. Rounds of the two are interleaved;
`cp` copies from /dev/shm and is timed until the disk has it (`sync -f`), the client from its first
prompt to its last sealed shard, which is as durable. Printed: the ratio round by round, bytes and
samples a second, and per core second that the client itself used, and what the client held in
memory (RSS) once it had stored 10,000 samples, and at each doubling after.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.command import (
    Failed,
    child,
    command_parser,
    directory,
    number_from,
    run_arguments,
    run_command,
    session_of,
)
from benchmarks.generator import VOCAB_SIZE
from extractor.status.live_file import read_live

#: By then everything is loaded and every queue is full: what comes on top grows with the prompts.
FIRST_RSS_SAMPLES = 10_000
LOOK_INTERVAL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class ClientRound:
    """One `extractor run`."""

    seconds: float  # from the first prompt to the last sealed shard
    core_s: float  # processor time of the whole command
    peak_rss_bytes: int
    rss_bytes: dict[int, int]  # by samples stored
    stored_bytes: int
    samples: int


class MemoryWatch(threading.Thread):
    """What a run holds in memory: at each doubling of what it has stored, and at most.

    The peak is the kernel's own. `wait4` would say it too, but begins with what the parent held.
    """

    def __init__(self, pid: int, out: Path) -> None:
        super().__init__(daemon=True)
        self._status = Path(f"/proc/{pid}/status")
        self._out = out
        self._ended = threading.Event()
        self.peak_rss_bytes = 0
        self.rss_bytes: dict[int, int] = {}

    def run(self) -> None:
        due = FIRST_RSS_SAMPLES
        while not self._ended.wait(LOOK_INTERVAL_S):
            try:
                status = self._status.read_text()
            except (FileNotFoundError, ProcessLookupError):
                return  # it has ended and was waited for
            memory = dict(re.findall(r"^(VmHWM|VmRSS):\s+(\d+) kB", status, re.M))
            if not memory:
                return  # it has ended
            self.peak_rss_bytes = 1024 * int(memory["VmHWM"])
            live = read_live(self._out)
            if live is not None and live.session["stored"] >= due:
                self.rss_bytes[live.session["stored"]] = 1024 * int(memory["VmRSS"])
                due = 2 * live.session["stored"]

    def stop(self) -> None:
        self._ended.set()
        self.join()


def write_prompts(path: Path, *, count: int, num_tokens: int) -> None:
    """Rows of random ids; few distinct ones, so that writing them takes no time."""
    generator = np.random.default_rng(0)
    lines = [
        json.dumps({"input_ids": generator.integers(3, VOCAB_SIZE, num_tokens).tolist()}) + "\n"
        for _ in range(min(count, 100))
    ]
    with open(path, "w") as file:
        for number in range(count):
            file.write(lines[number % len(lines)])


@contextmanager
def generator(dump_root: Path, options: argparse.Namespace) -> Iterator[str]:
    """Run one; its URL."""
    command = [
        sys.executable, "-m", "benchmarks.generator", "--dump-root", str(dump_root),
        "--hidden-size", str(options.hidden_size), "--num-boundaries", str(options.num_boundaries),
    ]  # fmt: skip
    with child(command) as process:
        assert process.stdout is not None
        url = process.stdout.readline().decode().strip()
        if not url:
            raise Failed("the generator did not start: see what it says above")
        yield url


def run_client(
    url: str, prompts: Path, out: Path, dump_root: Path, extra: list[str], *, to_null: bool
) -> ClientRound:
    module = "benchmarks.null_destination" if to_null else "extractor"
    command = [
        sys.executable, "-m", module,
        *run_arguments(prompts, out=out, server=url, dump_root=dump_root), *extra,
    ]  # fmt: skip
    with tempfile.TemporaryFile() as status_lines:
        with child(command, stderr=status_lines) as process:
            assert process.stdout is not None
            watch = MemoryWatch(process.pid, out)
            watch.start()
            output = process.stdout.read()
            watch.stop()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            status_lines.seek(0)
            sys.stderr.write(status_lines.read()[-4096:].decode(errors="replace"))
    session = session_of(output, process.returncode)
    return ClientRound(
        seconds=session["seconds"],
        core_s=usage.ru_utime + usage.ru_stime,
        peak_rss_bytes=watch.peak_rss_bytes,
        rss_bytes=watch.rss_bytes,
        stored_bytes=sum(path.stat().st_size for path in (out / "shards").iterdir()),
        samples=session["stored"],
    )


def run_cp(source: Path, target: Path) -> float:
    """Seconds to copy `source`, a directory, and have it on the disk."""
    begun = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    subprocess.run(["sync", "-f", target], check=True)
    return time.perf_counter() - begun


def make_source(directory: Path, *, total_bytes: int) -> None:
    """Files of 64 MiB with `total_bytes` in all."""
    directory.mkdir()
    block = np.random.default_rng(0).bytes(64 << 20)
    for number, begin in enumerate(range(0, total_bytes, len(block))):
        (directory / f"{number}").write_bytes(block[: total_bytes - begin])


def main() -> None:
    parser = command_parser(__doc__, __file__)
    parser.add_argument(
        "--out", type=directory, required=True, help="a directory on the disk measured"
    )
    parser.add_argument("--prompts", type=number_from(1), default=64, help="in a round")
    parser.add_argument("--prompt-tokens", type=number_from(1), default=2048, help="of each")
    parser.add_argument("--hidden-size", type=number_from(1), default=2048, help="of a state")
    parser.add_argument(
        "--num-boundaries", type=number_from(1), default=3, help="states beside the last"
    )
    parser.add_argument("--rounds", type=number_from(1), default=3, help="of each of the two")
    parser.add_argument("--null", action="store_true", help="the client's shards go nowhere")
    parser.add_argument("--json", type=Path, help="where the figures go too")
    parser.add_argument("client", nargs="*", help="options of `extractor run`, after --")
    options = parser.parse_args()
    row_bytes = 2 * options.hidden_size * (options.num_boundaries + 1)
    total_bytes = options.prompts * options.prompt_tokens * row_bytes
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    target = Path(tempfile.mkdtemp(prefix="client-pipeline-", dir=options.out))
    work = Path(tempfile.mkdtemp(prefix="client-pipeline-", dir="/dev/shm"))
    copied: list[float] = []
    ran: list[ClientRound] = []
    try:
        write_prompts(
            work / "prompts.jsonl", count=options.prompts, num_tokens=options.prompt_tokens
        )
        make_source(work / "source", total_bytes=total_bytes)
        with generator(work / "dumps", options) as url:
            for number in range(options.rounds):
                for name in ("cp", "client") if number % 2 == 0 else ("client", "cp"):
                    if name == "cp":
                        copied.append(run_cp(work / "source", target / "cp"))
                    else:
                        ran.append(
                            run_client(
                                url,
                                work / "prompts.jsonl",
                                target / "run",
                                work / "dumps",
                                options.client,
                                to_null=options.null,
                            )
                        )
                    shutil.rmtree(target / ("cp" if name == "cp" else "run"))
                show(number, copied[-1], ran[-1], total_bytes)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)
    ratios = [cp / client.seconds for cp, client in zip(copied, ran, strict=True)]
    seconds = [client.seconds for client in ran]
    core_s = statistics.median(client.core_s for client in ran)
    print(
        f"ratio to cp {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), "
        f"of the median to cp's best {min(copied) / statistics.median(seconds):.3f}, "
        f"{statistics.median(client.samples / client.seconds for client in ran):,.0f} samples/s, "
        f"{total_bytes / core_s / 1e9:.2f} GB per core second, "
        f"{max(client.peak_rss_bytes for client in ran) / 1e6:,.0f} MB resident at most"
    )
    if options.json:
        options.json.write_text(
            json.dumps({"cp_s": copied, "client": [asdict(client) for client in ran]}, indent=1)
        )


def show(number: int, cp_s: float, client: ClientRound, total_bytes: int) -> None:
    print(
        f"round {number}: cp {total_bytes / cp_s / 1e9:.2f} GB/s, "
        f"client {total_bytes / client.seconds / 1e9:.2f} GB/s, "
        f"{client.samples / client.seconds:,.0f} samples/s, {client.core_s:.1f} core s",
        flush=True,
    )
    for samples, rss in client.rss_bytes.items():
        print(f"  {samples:9,d} stored: {rss / 1e6:6.1f} MB resident", flush=True)


if __name__ == "__main__":
    run_command(main)

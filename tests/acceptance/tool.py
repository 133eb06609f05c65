"""The `extractor` command and the fake server as processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
#: Long enough for a busy machine; nothing waits for it when all is well.
PATIENCE_S = 180.0


def wait_until(has_come: Callable[[], bool], *, what: str, patience_s: float = PATIENCE_S) -> bool:
    """Return True once `has_come()`; fails naming `what` when it does not."""
    until = time.monotonic() + patience_s
    while not has_come():
        if time.monotonic() > until:
            raise AssertionError(f"waited {patience_s:.0f} s for this in vain: {what}")
        time.sleep(0.005)
    return True


@dataclass(frozen=True)
class Result:
    """How one command ended."""

    returncode: int
    stdout: str
    stderr: str

    def json(self) -> Any:
        return json.loads(self.stdout)


class Server:
    """What a run needs to know of a server; the contract tests have a real one of this shape."""

    url: str
    root: Path


@dataclass
class Fake(Server):
    """A running `python -m extractor.testing`."""

    url: str
    root: Path
    process: subprocess.Popen[str]

    def requests(self) -> int:
        """How many prompts came, probes included."""
        with urllib.request.urlopen(f"{self.url}/fake/requests", timeout=30) as reply:
            rids: list[str] = json.load(reply)
        return len(rids)


@contextmanager
def fake_server(root: Path, *arguments: str) -> Iterator[Fake]:
    process = subprocess.Popen(
        [sys.executable, "-m", "extractor.testing", "--dump-root", str(root), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        assert url, f"the fake server ended with {process.wait()}"
        yield Fake(url=url, root=root, process=process)
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


@dataclass
class Tool:
    """Runs `extractor`. Remembers what it started, so that a failed test leaves nothing behind."""

    cwd: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *arguments: object, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "extractor", *map(str, arguments)],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.cwd,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **self.environment},
        )
        self.started.append(process)
        return process

    def __call__(self, *arguments: object, stdin: str | None = None) -> Result:
        process = self.start(
            *arguments, stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE
        )
        stdout, stderr = process.communicate(stdin, timeout=PATIENCE_S)
        return Result(process.returncode, stdout, stderr)

    def start_run(
        self, prompts: Path, out: Path, server: Server, *arguments: object
    ) -> subprocess.Popen[str]:
        return self.start(*run_arguments(prompts, out, server), *arguments)

    def run(self, prompts: Path, out: Path, server: Server, *arguments: object) -> Result:
        return self(*run_arguments(prompts, out, server), *arguments)

    def stop_all(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()


def run_arguments(prompts: Path, out: Path, server: Server) -> list[object]:
    return [
        "run", prompts, "--out", out, "--server", server.url, "--dump-dir", server.root,
        "--tokenizer", "none", "--concurrency", 8,
    ]  # fmt: skip

"""One case's surroundings: prompts, a fake server, an output directory, and the command line.

Every command is a process of its own, forked from one that has the product imported already (a
hundredth of the time of a new interpreter), and runs `extractor.cli.main.main` with its arguments.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from helpers import dumps_under, make_prompts, quick, read_samples, rows_of, write_prompts

import extractor.cli.main
from extractor.core.timings import Timings
from extractor.dispatch.budget import max_prompts
from extractor.testing.fake_server import FakeServer
from extractor.testing.faults import FaultPlan, no_faults
from faults.steps import Fault, install, patch

_FORK = multiprocessing.get_context("fork")
#: Nothing waits for it when all is well.
PATIENCE_S = 60.0
NUM_PROMPTS = 24
CONCURRENCY = 4
SHARD_BYTES = 40_000  # about six samples
GROUP_SAMPLES = 2
#: Prompts in progress, and one probe a session.
MOST_IN_FLIGHT = max_prompts(CONCURRENCY, group_samples=GROUP_SAMPLES) + 1


def as_if_large(**groups: dict[str, Any]) -> Timings:
    """Timings of `helpers.quick`, with samples handled as large ones are.

    Samples as small as these would be read with their headers, be all on their way at once, and go
    to one mover. The harder case is that of dumps that wait in their files, of prompts that wait
    for those before them, and of several open shards.
    """
    groups["collect"] = {"whole_bytes": 0, **groups.get("collect", {})}
    groups["store"] = {
        "undivided_bytes": 0, "group_samples": GROUP_SAMPLES, **groups.get("store", {}),
    }  # fmt: skip
    return quick(**groups)


AS_IF_LARGE = as_if_large()
NO_PATCHES: Mapping[str, Any] = {}
_CLONE_NEWNS = 0x20000


@dataclass(frozen=True)
class Ended:
    """How one command ended."""

    code: int  # negative for a signal
    stdout: str
    stderr: str
    trace: tuple[str, ...]  # steps it reached; faults that happened begin with "!"

    @property
    def has_fired(self) -> bool:
        return any(line.startswith("!") for line in self.trace)

    def __str__(self) -> str:
        return f"exit {self.code}\n--- stderr\n{self.stderr}\n--- stdout\n{self.stdout[-2000:]}"


class LoggedServer(FakeServer):
    """Tells every rid to a file, so that a killed one's are known too."""

    log: Path

    async def _generate(self, request: Any) -> Any:
        body = await request.json()
        with open(self.log, "a") as log:  # noqa: ASYNC230 - a line
            log.write(body["rid"] + "\n")
        return await super()._generate(request)


@dataclass
class Arena:
    """A directory, a dump root and what runs in them. Use as a context manager."""

    seed: int = 0
    num_prompts: int = NUM_PROMPTS
    directory: Path = field(init=False)
    root: Path = field(init=False)

    def __enter__(self) -> Arena:
        self.directory = Path(tempfile.mkdtemp(prefix="faults-"))
        self.root = Path(tempfile.mkdtemp(prefix="faults-", dir="/dev/shm"))
        self.out = self.directory / "out"
        self.prompts = make_prompts(self.num_prompts, seed=self.seed, shortest=20)
        self.path = write_prompts(self.directory / "p.jsonl", self.prompts)
        self.chance = random.Random(self.seed)
        self.port = 0
        self.server: BaseProcess | None = None
        self._children: list[BaseProcess] = []
        self._mounts: list[Path] = []
        self._log = self.directory / "requests.log"
        self._log.touch()
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            if child.is_alive():
                assert child.pid is not None
                os.kill(child.pid, signal.SIGCONT)
                child.kill()
            child.join()
        for path in reversed(self._mounts):
            ctypes.CDLL(None).umount2(os.fsencode(path), 2)  # MNT_DETACH
        for directory in (self.directory, self.root):
            shutil.rmtree(directory, ignore_errors=True)

    # --- the server ------------------------------------------------------------------------------

    def start_server(self, faults: FaultPlan = no_faults, **changes: Any) -> None:
        """A fake server, at the same address as the one before it."""
        ready = self.directory / f"server-{time.monotonic_ns()}"
        values = {"chunk_tokens": 16, **changes}
        self.server = self._fork(partial(self._serve, faults, values, ready))
        self._wait(ready.exists, "the server's address")
        self.port = int(ready.read_text())

    def _serve(self, faults: FaultPlan, values: dict[str, Any], ready: Path) -> None:
        async def serve() -> None:
            server = LoggedServer(self.root, faults=faults, **values)
            server.log = self._log
            async with server.running(port=self.port):
                temporary = ready.with_suffix(".tmp")
                temporary.write_text(server.url.rpartition(":")[2])
                temporary.rename(ready)
                await asyncio.Event().wait()

        asyncio.run(serve())

    def stop_server(self) -> None:
        """Kill -9."""
        assert self.server is not None
        self.server.kill()
        self.server.join()

    @property
    def is_server_alive(self) -> bool:
        return self.server is not None and self.server.is_alive()

    def ordinals_sent(self) -> list[int]:
        rids = [rid.split("-") for rid in self._log.read_text().split()]
        return [int(ordinal) for _, _, session, ordinal, _ in rids if "probe" not in session]

    # --- the command line ------------------------------------------------------------------------

    def run(
        self,
        *arguments: object,
        plan: Sequence[Fault] = (),
        timings: Timings = AS_IF_LARGE,
        patches: Mapping[str, Any] = NO_PATCHES,
    ) -> Ended:
        """`extractor run` with these faults. `patches`: `module.NAME` -> what is put there."""
        return self.end(self.start_run(*arguments, plan=plan, timings=timings, patches=patches))

    def start_run(
        self,
        *arguments: object,
        plan: Sequence[Fault] = (),
        timings: Timings = AS_IF_LARGE,
        patches: Mapping[str, Any] = NO_PATCHES,
    ) -> tuple[BaseProcess, Path]:
        words = [
            "run", self.path, "--out", self.out, "--server", f"http://127.0.0.1:{self.port}",
            "--dump-dir", self.root, "--tokenizer", "none", "--concurrency", CONCURRENCY,
            "--shard-size", SHARD_BYTES, *arguments,
        ]  # fmt: skip
        return self._start(words, plan, timings, patches)

    def command(self, *arguments: object, plan: Sequence[Fault] = ()) -> Ended:
        """Any other command."""
        return self.end(self._start(list(arguments), plan, AS_IF_LARGE, NO_PATCHES))

    def _start(
        self,
        words: Sequence[object],
        plan: Sequence[Fault],
        timings: Timings,
        patches: Mapping[str, Any],
    ) -> tuple[BaseProcess, Path]:
        place = Path(tempfile.mkdtemp(prefix="command-", dir=self.directory))
        return self._fork(partial(self._command, words, plan, timings, patches, place)), place

    def _command(
        self,
        words: Sequence[object],
        plan: Sequence[Fault],
        timings: Timings,
        patches: Mapping[str, Any],
        place: Path,
    ) -> None:
        for number, name in ((0, os.devnull), (1, place / "stdout"), (2, place / "stderr")):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT, 0o600), number)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT
                          else signal.SIG_DFL)  # fmt: skip
        sys.argv = ["extractor", *map(str, words)]
        patch(patches)
        install(plan, place / "trace", self.server.pid if self.server and self.server.pid else 0)
        extractor.cli.main.main(timings)

    def end(self, started: tuple[BaseProcess, Path]) -> Ended:
        """Wait for a command."""
        process, place = started
        process.join(PATIENCE_S)
        if process.exitcode is None:
            raise AssertionError(
                f"the command does not end; it wrote:\n{(place / 'stderr').read_text()}"
            )
        return Ended(
            process.exitcode,
            (place / "stdout").read_text(),
            (place / "stderr").read_text(),
            tuple((place / "trace").read_text().splitlines()),
        )

    def wait_for_fault(self, started: tuple[BaseProcess, Path]) -> None:
        """Until a fault of the command's plan happened."""
        trace = started[1] / "trace"
        self._wait(lambda: trace.exists() and "!" in trace.read_text(), "the fault")

    def wait_for_words(self, started: tuple[BaseProcess, Path], words: str, times: int = 1) -> None:
        """Until a command has said so on stderr."""
        said = started[1] / "stderr"
        self._wait(lambda: said.exists() and said.read_text().count(words) >= times, words)

    def _fork(self, target: Callable[[], None]) -> BaseProcess:
        child = _FORK.Process(target=target)
        child.start()
        self._children.append(child)
        return child

    @staticmethod
    def _wait(has_come: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + PATIENCE_S
        while not has_come():
            if time.monotonic() > until:
                raise AssertionError(f"waited in vain for {what}")
            time.sleep(0.002)

    # --- small file systems ----------------------------------------------------------------------

    def mount(self, path: Path, size_bytes: int) -> None:
        """A small tmpfs at `path`, seen by this process and its children only.

        Raises PermissionError where that is not allowed.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        path.mkdir(parents=True, exist_ok=True)
        options = f"size={size_bytes},mode=0700"  # others could change what is under a root else
        private = 1 << 18 | 1 << 14  # MS_PRIVATE | MS_REC
        if not self._mounts and (
            libc.unshare(_CLONE_NEWNS) or libc.mount(b"none", b"/", None, private, None)
        ):
            raise PermissionError(ctypes.get_errno(), "no mounts of our own allowed here")
        if libc.mount(b"none", os.fsencode(path), b"tmpfs", 0, options.encode()):
            raise PermissionError(ctypes.get_errno(), f"cannot mount at {path}")
        self._mounts.append(path)

    def remount(self, path: Path, *, is_read_only: bool = False, size_bytes: int = 0) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        flags = 32 | (1 if is_read_only else 0)  # MS_REMOUNT | MS_RDONLY
        options = f"size={size_bytes}".encode() if size_bytes else None
        if libc.mount(b"none", os.fsencode(path), b"tmpfs", flags, options):
            raise PermissionError(ctypes.get_errno(), f"cannot remount {path}")

    # --- what must hold --------------------------------------------------------------------------

    def digests(self) -> dict[int, str]:
        return {ordinal: sample.digest for ordinal, sample in read_samples(self.out).items()}

    def assert_whole(self, undisturbed: dict[int, str], *, without: Sequence[int] = ()) -> None:
        """The data set is what an undisturbed run gives, and nothing else is left anywhere."""
        verified = self.command("verify", self.out, "--json")
        assert verified.code == 0, f"verify: {verified}"
        expected = {n: digest for n, digest in undisturbed.items() if n not in without}
        assert self.digests() == expected
        assert len(rows_of(self.out)) == self.num_prompts
        assert (left := self.left_behind()) == [], left

    def dumps(self) -> list[str]:
        return dumps_under(self.root)

    def left_behind(self) -> list[str]:
        """Temporary files anywhere, and dumps."""
        found = [
            str(path)
            for path in self.root.rglob("*")
            if path.is_file() and path.name != "READY.json"
        ]
        for path in self.out.rglob("*"):
            name = str(path.relative_to(self.out))
            is_known = name in ("manifest.sqlite", "dataset.json", "shards", ".lock")
            if not is_known and not name.startswith("shards/shard-"):
                found.append(name)
        return found

    def assert_sent_at_most(self, kills: int) -> None:
        sent = self.ordinals_sent()
        most = self.num_prompts + kills * MOST_IN_FLIGHT
        assert len(sent) <= most, f"{len(sent)} prompts sent, at most {most} were to be"
        assert set(sent) == set(range(self.num_prompts))


def undisturbed_digests(seed: int = 0) -> dict[int, str]:
    """What a run that nothing happens to gives; and what steps it goes through, as a check."""
    with Arena(seed=seed) as arena:
        arena.start_server()
        ended = arena.run()
        assert ended.code == 0, ended
        arena.assert_whole(arena.digests())
        arena.assert_sent_at_most(0)
        return arena.digests()


def read_json(ended: Ended) -> Any:
    with suppress(ValueError):
        return json.loads(ended.stdout)
    raise AssertionError(f"no JSON: {ended}")

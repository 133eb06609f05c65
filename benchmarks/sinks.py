"""What takes the dumps away while a server is measured: nobody, or the real client."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.command import Failed, run_arguments, session_of
from benchmarks.engines import Engine
from prompts.types import Prompt
from server_patch.dump_format import is_dump_name, is_error_name


class NullSink:
    """Removes dumps as they appear and counts them: a client that costs nothing.

    A process of its own, so that it takes nothing from the one that sends the prompts.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        context = multiprocessing.get_context("spawn")
        self._up = context.Event()
        self._stop = context.Event()
        self._active = context.Event()
        self._active.set()
        self._resting = context.Event()
        self._counts = context.Array("q", 3)  # dumps, error records, bytes
        self._process = context.Process(
            target=_sink,
            args=(
                tuple(directories),
                self._up,
                self._stop,
                self._active,
                self._resting,
                self._counts,
            ),
            daemon=True,
        )

    def __enter__(self) -> NullSink:
        self._process.start()
        while not self._up.wait(1.0):
            if not self._process.is_alive():
                raise Failed(f"the sink ended with {self._process.exitcode}")
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._process.join()

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Inside the block somebody else takes the dumps."""
        self._active.clear()
        self._resting.wait()
        try:
            yield
        finally:
            self._resting.clear()
            self._active.set()

    @property
    def num_dumps(self) -> int:
        return int(self._counts[0])

    @property
    def num_errors(self) -> int:
        return int(self._counts[1])

    @property
    def num_bytes(self) -> int:
        return int(self._counts[2])


def _sink(
    directories: Sequence[Path], up: Any, stop: Any, active: Any, resting: Any, counts: Any
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches us too; our parent stops us
    up.set()
    is_last = False
    while not is_last:
        if not active.is_set():
            resting.set()
            active.wait()
        is_last = stop.is_set()  # looked at before the last sweep, which then misses nothing
        if not sum(_sweep(directory, counts) for directory in directories):
            stop.wait(0.005)


def _sweep(directory: Path, counts: Any) -> int:
    found = 0
    with suppress(FileNotFoundError):
        for entry in os.scandir(directory):
            if is_dump_name(entry.name):
                counts[0] += 1
                counts[2] += entry.stat().st_size
            elif is_error_name(entry.name):
                counts[1] += 1
            else:
                continue
            os.unlink(entry.path)
            found += 1
    return found


@dataclass(frozen=True, kw_only=True)
class Extraction:
    """What one `extractor run` did."""

    tokens: int
    seconds: float  # from the first prompt to the last sealed shard
    stored_bytes: int


async def extract(
    server: Engine, prompts: Path, out: Path, dump_root: Path, *, arguments: Sequence[str] = ()
) -> Extraction:
    """The real client on the real command line. Raises Failed unless every row is stored."""
    output, status = await run_client(
        *run_arguments(prompts, out=out, server=server.url, dump_root=dump_root), *arguments
    )  # fmt: skip
    session = session_of(output, status)
    return Extraction(
        tokens=session["tokens"],
        seconds=session["seconds"],
        stored_bytes=sum(path.stat().st_size for path in (out / "shards").iterdir()),
    )


async def run_client(*arguments: str | Path) -> tuple[bytes, int]:
    """`extractor ARGUMENTS`: what it prints, and its exit status. Cancelled, it ends it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "extractor", *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
        status = await process.wait()
    return output, status


class ClientSink:
    """The real client, which stores every round's prompts anew under `directory`."""

    def __init__(
        self, server: Engine, directory: Path, dump_root: Path, *, arguments: Sequence[str]
    ) -> None:
        self._server = server
        self._directory = directory
        self._dump_root = dump_root
        self._arguments = tuple(arguments)

    async def store(self, prompts: Sequence[Prompt]) -> Extraction:
        """Run the client on `prompts`, and remove what it stored."""
        with tempfile.TemporaryDirectory(dir=self._directory) as work:
            path = Path(work) / "prompts.jsonl"
            write_prompts(path, prompts)
            return await extract(
                self._server, path, Path(work) / "out", self._dump_root, arguments=self._arguments
            )


def write_prompts(path: Path, prompts: Sequence[Prompt]) -> None:
    """Rows of token ids, as `extractor run` reads them."""
    with open(path, "w") as file:
        for prompt in prompts:
            file.write(json.dumps({"input_ids": prompt.input_ids.tolist()}) + "\n")

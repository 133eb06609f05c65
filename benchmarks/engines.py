"""Starts SGLang servers for benchmarks: with the plugin or plain, same arguments otherwise."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.command import Failed
from extractor.core.locations import DumpRoot
from extractor.dumps.discovery import scan_writers
from extractor.dumps.dump_reader import Rank
from extractor.servers.client import Client
from extractor.servers.launcher import free_port
from extractor.servers.sglang_flags import EngineOptions, PluginOptions, ServeOptions
from extractor.system.process_tree import ServerProcess, started

START_TIMEOUT_S = 420.0


@dataclass(kw_only=True)
class Engine:
    """A running server. `ranks` is empty for a plain one."""

    name: str
    url: str
    process: ServerProcess
    ranks: tuple[Rank, ...]
    start_s: float


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """How to start one server."""

    name: str
    model: str
    port: int
    dump_root: Path | None  # None: a plain server
    layers: str = "eagle3"
    last_kind: str = "post"
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def free_ports(count: int) -> list[int]:
    """That many different ones: a server takes its own only when its model is loaded."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)


@asynccontextmanager
async def engine(spec: EngineSpec, *, log_directory: Path) -> AsyncIterator[Engine]:
    """Run a server; ready when it is healthy and, with the plugin, every rank has announced itself.

    Raises Failed with the log's end when it does not come up.
    """
    root = spec.dump_root or Path("/nonexistent")
    options = ServeOptions(
        engine=EngineOptions(model=spec.model, port=spec.port, arguments=spec.arguments),
        plugin=PluginOptions(dump_root=root, layers=spec.layers, last_kind=spec.last_kind),
    )
    version = importlib.metadata.version("sglang")
    boot_id = f"{spec.name}-{secrets.token_hex(3)}"
    base = {**os.environ, **spec.environment}
    if spec.dump_root is None:
        environment = {**base, "PYTHONUNBUFFERED": "1"}
    else:
        environment = options.environment(base, boot_id=boot_id)
    command = options.engine.command(sys.executable, engine_version=version)
    log_directory.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="engine-", ignore_cleanup_errors=True) as scratch:
        environment["TMPDIR"] = scratch  # it leaves its sockets there
        async with (
            started(
                command, environment=environment, log_path=log_directory / f"{spec.name}.log"
            ) as process,
            Client(options.engine.url, concurrency=1, request_timeout_s=60.0) as client,
        ):
            ranks: tuple[Rank, ...] = ()
            while True:
                tail = process.log_text(tail_bytes=6000)
                if process.exit_status is not None:
                    raise Failed(f"{spec.name} ended with {process.exit_status}:\n{tail}")
                if time.monotonic() - begun > START_TIMEOUT_S:
                    raise Failed(f"{spec.name} not up in {START_TIMEOUT_S:.0f} s:\n{tail}")
                if await client.is_healthy():
                    writers = scan_writers(DumpRoot(path=root))
                    ranks = tuple(r for r in writers.alive if r.ready.boot_id.startswith(boot_id))
                    if any(failed.boot_id == boot_id for failed in writers.failed):
                        raise Failed(f"{spec.name}: {writers.failed}")
                    if spec.dump_root is None or (
                        ranks and len(ranks) == ranks[0].ready.engine.dp_size
                    ):
                        break
                await asyncio.sleep(1.0)
            start_s = time.monotonic() - begun
            print(f"# {spec.name} up after {start_s:.0f} s", flush=True)
            yield Engine(
                name=spec.name,
                url=options.engine.url,
                process=process,
                ranks=ranks,
                start_s=start_s,
            )


@asynccontextmanager
async def engines(
    specs: Sequence[EngineSpec], *, log_directory: Path
) -> AsyncIterator[dict[str, Engine]]:
    """Run several servers that start at the same time; by name. The first that does not come up,
    and whatever ends the block, ends them all, those that still start included."""
    up: dict[str, asyncio.Future[Engine]] = {
        spec.name: asyncio.get_running_loop().create_future() for spec in specs
    }

    async def keep(spec: EngineSpec) -> None:
        try:
            async with engine(spec, log_directory=log_directory) as running:
                up[spec.name].set_result(running)
                await asyncio.Event().wait()  # until it is cancelled
        except Exception as error:
            if up[spec.name].done():
                raise
            up[spec.name].set_exception(error)

    tasks = [asyncio.create_task(keep(spec), name=spec.name) for spec in specs]
    try:
        await asyncio.gather(*up.values())
        yield {name: future.result() for name, future in up.items()}
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for future in up.values():
            if future.done() and not future.cancelled():
                future.exception()  # looked at, so that nobody warns of it

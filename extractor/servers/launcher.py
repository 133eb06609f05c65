"""Starts SGLang with the plugin and logs each startup stage.

A start takes from twenty seconds to many minutes, and a hung one looks like a slow one. So each
stage is watched for, and a stall is reported with the stage, its age, the log's last line and
what to try.
"""

from __future__ import annotations

import asyncio
import errno
import importlib.metadata
import os
import random
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from urllib.parse import urlsplit

from extractor.core.errors import MissingExtra, PluginError, ServerError, UsageError
from extractor.core.locations import DumpRoot
from extractor.core.timings import DEFAULT_TIMINGS, Timings
from extractor.dumps.discovery import scan_writers
from extractor.dumps.dump_root import open_root
from extractor.servers.api_key import ApiKey, find_api_key
from extractor.servers.cleanup import remove_boot, remove_useless
from extractor.servers.client import Client
from extractor.servers.probe import require_probe
from extractor.servers.sglang_flags import (
    CONFIG_ARGUMENT,
    EngineOptions,
    ServeOptions,
    holds_key,
    key_config,
)
from extractor.servers.target import Target, require_plugin
from extractor.system.process_tree import ServerProcess, started
from prompts.regular_file import open_regular

MAX_CONFIG_BYTES = 1 << 20
WEIGHTS_LOADED_MARK = "Load weight end"


class StartStage(Enum):
    """How far a server got: what it reached, and what to try when it gets no further."""

    STARTED = ("process alive", "is the Python environment on a slow disk? Look at the log")
    LOGGING = (
        "log growing",
        "it may be loading weights from a slow disk, or downloading them: watch the disk",
    )
    WEIGHTS = (
        "weights loaded",
        "kernels may be compiling (minutes, once per machine); with several GPUs a hang here is "
        "often NCCL: try --preset multi-gpu",
    )
    LISTENING = (
        "port listening",
        "the warm-up request may be compiling kernels; if the GPU idles, try another "
        "--attention-backend after the --",
    )
    HEALTHY = (
        "healthy",
        "the plugin did not announce itself: is hidden-state-extractor installed in the server's "
        "environment, and does SGLANG_PLUGINS (if set) name hidden_states?",
    )
    READY = ("plugin READY", "the probe prompt was sent; see the log for errors of its request")
    PROBED = ("probe dump arrived", "")

    def __init__(self, title: str, advice: str) -> None:
        self.title = title
        self.advice = advice


@dataclass(frozen=True, kw_only=True)
class StartedServer:
    """A server of ours that passed every stage."""

    url: str
    process: ServerProcess
    target: Target


@asynccontextmanager
async def running_server(
    options: ServeOptions,
    *,
    report: Callable[[str], None],
    timings: Timings = DEFAULT_TIMINGS,
) -> AsyncIterator[StartedServer]:
    """Start a server, wait for its last stage, stop its whole tree at the end of the block.

    Raises MissingExtra without SGLang, ServerError with the log's end when the server dies or its
    plugin gives up, UsageError when its port is taken.
    """
    engine_version = _engine_version()
    await _require_free_port(options.engine)
    dump_root = options.plugin.dumps
    open_root(dump_root, make_mode=options.plugin.directory_mode)
    key = find_api_key(options.api_key_file)
    remove_useless(dump_root)
    boot_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    log_path = options.log_path or _new_log_path()
    key_path = None if key is None else _key_path(options.engine, key)
    try:
        async with started(
            options.engine.command(
                sys.executable, engine_version=engine_version, key_path=key_path
            ),
            environment=options.environment(os.environ, boot_id=boot_id),
            log_path=log_path,
            secrets=() if key is None else (key.value,),
            timings=timings.stop,
        ) as process:
            report(f"SGLang {engine_version}, pid {process.pid}, log {log_path}")
            start = _Start(
                url=options.engine.url,
                dump_root=dump_root,
                process=process,
                boot_id=boot_id,
                progress=_Progress(process, stall_s=options.stall_s, report=report),
                timings=timings,
                api_key_file=options.api_key_file,
            )
            target = await start.until_probed()
            _remove_key(key_path)
            yield StartedServer(url=target.url, process=process, target=target)
        if options.log_path is None:
            log_path.unlink()  # kept when something went wrong
    finally:
        _remove_key(key_path)
        remove_boot(dump_root, boot_id)


class _Progress:
    """Reports each stage that a start reaches, and a start that stands still."""

    def __init__(
        self, process: ServerProcess, *, stall_s: float, report: Callable[[str], None]
    ) -> None:
        self._process = process
        self._stall_s = stall_s
        self._report = report
        self._began_at = time.monotonic()
        self._log_size = 0
        self.reach(StartStage.STARTED)

    def reach(self, stage: StartStage) -> None:
        self.stage = stage
        # Of the stage, of the last sign of life, and of the last report.
        self._reached_at = self._sign_at = self._reported_at = time.monotonic()
        self._report(f"{self._reached_at - self._began_at:7.1f} s  {stage.title}")

    def look(self) -> None:
        """Report a stall: neither a stage nor a line in the log for `stall_s`."""
        now = time.monotonic()
        size = self._process.log_size()
        if size != self._log_size:
            self._log_size, self._sign_at = size, now
        if now - max(self._sign_at, self._reported_at) < self._stall_s:
            return
        self._reported_at = now
        self._report(
            f"stalled: {now - self._reached_at:.0f} s since '{self.stage.title}', the log is "
            f"silent for {now - self._sign_at:.0f} s. Its last line: "
            f"{self._process.log_end(num_lines=1).strip() or '(empty)'}\n"
            f"What to try: {self.stage.advice}"
        )


@dataclass(frozen=True, kw_only=True)
class _Start:
    """Follows one start through its stages."""

    url: str
    dump_root: DumpRoot
    process: ServerProcess
    boot_id: str
    progress: _Progress
    timings: Timings
    api_key_file: Path | None

    async def until_probed(self) -> Target:
        async with Client(
            self.url,
            concurrency=2,
            request_timeout_s=self.timings.probe.first_request_s,
            api_key_file=self.api_key_file,
            timings=self.timings.client,
        ) as client:
            await self._until(StartStage.LOGGING, self._has_logged)
            await self._until(StartStage.WEIGHTS, self._has_weights)
            await self._until(StartStage.LISTENING, lambda: _is_listening(self.url))
            await self._until(StartStage.HEALTHY, client.is_healthy)
            await self._until(StartStage.READY, self._is_announced)
            facts = await client.facts()
            ranks = require_plugin(self.dump_root, url=self.url, facts=facts)
            target = Target.of(client.url, facts, ranks)
            probe = asyncio.create_task(
                require_probe(client, target, run_id=secrets.token_hex(4), timings=self.timings),
                name="probe",
            )
            try:
                await self._until(StartStage.PROBED, probe.done)
            finally:
                probe.cancel()
                await asyncio.wait([probe])  # it leaves nothing behind
            await probe
            return target

    async def _until(
        self, stage: StartStage, is_reached: Callable[[], bool | Awaitable[bool]]
    ) -> None:
        while True:
            self._require_alive()
            reached = is_reached()
            if await reached if isinstance(reached, Awaitable) else reached:
                self.progress.reach(stage)
                return
            self.progress.look()
            await asyncio.sleep(self.timings.probe.stage_poll_s)

    def _require_alive(self) -> None:
        status = self.process.exit_status
        if status is not None:
            raise ServerError(
                f"the server ended with status {status} after stage "
                f"'{self.progress.stage.title}'. The end of its log "
                f"({self.process.log_path}):\n{self.process.log_end()}"
            )

    # --- what is looked for ------------------------------------------------------------------

    def _has_logged(self) -> bool:
        return self.process.log_size() > 0

    def _has_weights(self) -> bool:
        return WEIGHTS_LOADED_MARK in self.process.log_text(tail_bytes=8 << 20)

    def _is_announced(self) -> bool:
        writers = scan_writers(self.dump_root)
        for failed in writers.failed:
            if failed.boot_id.startswith(self.boot_id):
                raise PluginError(f"the plugin captures nothing: {failed.reason}")
        mine = [rank for rank in writers.alive if rank.ready.boot_id.startswith(self.boot_id)]
        return bool(mine) and len(mine) >= mine[0].ready.engine.dp_size


async def any_server_answers(urls: Sequence[str], *, api_key_file: Path | None) -> bool:
    """Whether a SGLang server answers at one of `urls` now."""
    for url in urls:
        async with Client(
            url, concurrency=1, request_timeout_s=5.0, api_key_file=api_key_file
        ) as client:
            if await client.is_answering():
                return True
    return False


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port of `host` that was free a moment ago.

    Below the ports that the kernel and SGLang itself hand out: the server listens on it only
    when its model is loaded, minutes later.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        port = random.randint(20000, 29999)
        with socket.socket(family) as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise UsageError(f"--host {host}: cannot listen there ({error})") from error
                continue
            return port


async def _is_listening(url: str) -> bool:
    parts = urlsplit(url)
    try:
        _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except OSError:
        return False
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return True


async def _require_free_port(options: EngineOptions) -> None:
    free_port(options.host)  # check that the address belongs to this machine
    if await _is_listening(options.url):
        raise UsageError(
            f"something listens on {options.url} already: stop it or name another --port"
        )


def _engine_version() -> str:
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise MissingExtra(command="extractor serve", extra="server", package="sglang") from None


def _new_log_path() -> Path:
    descriptor, path = tempfile.mkstemp(prefix="sglang-", suffix=".log")
    os.close(descriptor)
    return Path(path)


def _key_path(engine: EngineOptions, key: ApiKey) -> Path | None:
    """A new file that only we can read, from which the server takes its key. None where the user's
    own file of arguments holds one: SGLang reads one such file."""
    if (config := engine.config_path) is not None:
        if not config.is_file():
            raise UsageError(f"-- {CONFIG_ARGUMENT} {config}: no such file")
        with open_regular(config) as file:
            if holds_key(file.read(MAX_CONFIG_BYTES).decode(errors="replace")):
                return None
        raise UsageError(
            f"{key.origin} holds a key for the server, but SGLang reads one {CONFIG_ARGUMENT} "
            f"file: write `api-key: …` into {config}, too (mode 600)"
        )
    descriptor, path = tempfile.mkstemp(prefix="sglang-", suffix=".yaml")
    with open(descriptor, "w") as file:
        file.write(key_config(key))
    return Path(path)


def _remove_key(path: Path | None) -> None:
    if path is not None:
        path.unlink(missing_ok=True)

"""Checks the requirements of a run, for `extractor doctor`: OK or PROBLEM, and the remedy."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import resource
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from extractor.core.errors import UsageError, exit_code, message_of
from extractor.core.humanize import amount, counted
from extractor.core.locations import DumpRoot
from extractor.core.version import __version__
from extractor.dumps.discovery import require_dump_directory
from extractor.dumps.dump_reader import Rank
from extractor.dumps.dump_root import open_root
from extractor.servers.cleanup import find_leftovers, find_waiting, remove_leftovers
from extractor.servers.client import Client
from extractor.servers.probe import require_probe
from extractor.servers.shm_budget import headroom, shm_budget
from extractor.servers.target import Target, require_plugin, require_server
from extractor.shards.output_dir import manifest_warning, prepare_out
from extractor.system.files import free_bytes, nearest_existing
from extractor.system.shared_memory import unused_files

LEAST_FILES = 1024
MAX_SHOWN_FILES = 5

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the report."""

    name: str
    problem: str | None = None  # what is wrong and what to do; None when all is well
    detail: str = ""

    def __str__(self) -> str:
        if self.problem is None:
            return f"OK       {self.name}: {self.detail}"
        return f"PROBLEM  {self.name}: {self.problem}"


async def examine(
    *, url: str, dump_root: DumpRoot, out: Path, server_wait_s: float, clean: bool = False
) -> AsyncIterator[Check]:
    """Every check that can be made; those that need a failed one are left out."""
    yield _versions()
    yield _open_files()
    yield (await _try("output disk", asyncio.to_thread(_out, out)))[0]
    check, root = await _try("dump root", asyncio.to_thread(_dump_root, dump_root))
    yield check
    if root is not None:
        yield _leftovers(dump_root, is_to_clean=clean)
    async with Client(url, concurrency=2, request_timeout_s=120.0) as client:
        check, facts = await _try(
            "server",
            require_server(client, wait_s=server_wait_s),
            lambda facts: f"{url} serves {facts.model_path} on SGLang {facts.version}",
        )
        yield check
        if facts is None:
            return
        check, ranks = await _try(
            "plugin",
            asyncio.to_thread(require_plugin, dump_root, url=url, facts=facts),
            lambda ranks: (
                f"version {ranks[0].ready.capture.plugin_version}, {len(ranks)} writer(s), "
                f"pid {ranks[0].ready.process.pid}, {ranks[0].path}"
            ),
        )
        yield check
        if ranks is None:
            return
        ready = ranks[0].ready
        layout = ready.layout
        yield Check(
            name="layers",
            detail=f"boundaries {list(layout.boundaries)} of {ready.model.num_layers} layers, "
            f"last state {layout.last_kind}, {layout.dtype}, hidden size {layout.hidden_size}",
        )
        check, target = await _try(
            "limits",
            asyncio.to_thread(Target.of, client.url, facts, ranks),
            lambda target: (
                f"prompts of at most {target.limits.max_prompt_tokens:,} tokens, vocabulary "
                f"{target.limits.vocab_size:,}, chunks of {target.limits.chunk_tokens:,}"
            ),
        )
        yield check
        if target is None:
            return
        check, _ = await _try(
            "dump directory",
            asyncio.to_thread(require_dump_directory, ranks),
            lambda _: "files can be created and removed",
        )
        yield check
        check, _ = await _try(
            "budget",
            asyncio.to_thread(shm_budget, ranks, None, limits=target.limits),
            lambda budget: _budget(budget, ranks),
        )
        yield check
        check, _ = await _try(
            "probe",
            require_probe(client, target, run_id=secrets.token_hex(4)),
            lambda _: "a prompt was sent and its dump arrived whole",
        )
        yield check


def _budget(budget: int, ranks: Sequence[Rank]) -> str:
    room = headroom(ranks)
    doubt = "" if room.doubt is None else f"; {room.doubt}"
    return f"{amount(budget)} of dumps at a time: {room.what} {amount(room.free_bytes)}{doubt}"


async def _try(
    name: str, work: Awaitable[Result], describe: Callable[[Any], str] = str
) -> tuple[Check, Result | None]:
    """The check that `work` makes, and its result; None where it found a problem."""
    try:
        result = await work
    except Exception as error:
        if exit_code(error) is None and not isinstance(error, OSError):
            raise
        return Check(name=name, problem=message_of(error)), None
    return Check(name=name, detail=describe(result)), result


def _versions() -> Check:
    try:
        engine = f"sglang {importlib.metadata.version('sglang')} here"
    except importlib.metadata.PackageNotFoundError:
        engine = "sglang not in this environment (the server may have its own)"
    python = ".".join(map(str, sys.version_info[:3]))
    return Check(
        name="versions",
        detail=f"hidden-state-extractor {__version__}, Python {python}, {engine}",
    )


def _open_files() -> Check:
    # A run raises its own soft limit, up to the hard limit.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < LEAST_FILES:
        return Check(
            name="open files",
            problem=f"at most {hard} are allowed; raise the limit (`ulimit -n {LEAST_FILES}`)",
        )
    return Check(name="open files", detail=f"up to {hard}" if hard > 0 else "no limit")


def _out(out: Path) -> str:
    nearest = nearest_existing(out)
    if nearest == out:
        prepare_out(out)
    elif not os.access(nearest, os.W_OK):
        raise UsageError(f"{nearest} is not writable; name another --out")
    warning = manifest_warning(nearest)
    return f"{out}: {amount(free_bytes(nearest))} free" + (f"; {warning}" if warning else "")


def _dump_root(root: DumpRoot) -> str:
    if open_root(root) is None:
        raise UsageError(
            f"{root.path} does not exist: no server with the plugin was ever started for it"
        )
    return f"{root.path}: {amount(free_bytes(root.path))} free"


def _leftovers(root: DumpRoot, *, is_to_clean: bool) -> Check:
    removed = remove_leftovers(root) if is_to_clean else []
    left = find_leftovers(root)
    waiting = [
        f"{found.directory} (under a live server: {counted(found.num_dumps, 'dump')} of the run "
        f"{found.run_id}, {amount(found.size_bytes)})"
        for found in find_waiting(root)
    ]
    if waiting:
        waiting.append(
            "dumps under a live server are those of a run that goes on, or were left by a killed "
            "one: then the same `extractor run` adopts them, or end the server and use --clean"
        )
    notes = [*waiting, *_shared_memory()]
    if not left:
        done = []
        if removed:
            size = amount(sum(leftover.size_bytes for leftover in removed))
            done = [f"removed {size}: " + ", ".join(str(leftover.path) for leftover in removed)]
        return Check(name="leftovers", detail="; ".join([*done, *notes]) or "none")
    lines = [
        f"{leftover.path} ({leftover.what}, {amount(leftover.size_bytes)})" for leftover in left
    ]
    if any(leftover.is_removable for leftover in left):
        is_all = all(leftover.is_removable for leftover in left)
        lines.append(
            "the next `extractor run` of the same --out adopts its own dumps; "
            f"`extractor doctor --clean` removes {'all' if is_all else 'what dead servers left'}"
        )
    return Check(name="leftovers", problem="; ".join([*lines, *notes]))


def _shared_memory() -> list[str]:
    """The files that killed servers left in /dev/shm: too small to be a problem."""
    unused = unused_files()
    if not unused:
        return []
    names = ", ".join(str(path) for path in [*unused][:MAX_SHOWN_FILES])
    more = ", …" if len(unused) > MAX_SHOWN_FILES else ""
    return [
        f"{counted(len(unused), 'file')} of SGLang's that no process here uses "
        f"({amount(sum(unused.values()))}: {names}{more}): unless a server runs in another "
        "container, remove them by hand"
    ]

"""Edge: who writes under the dump root: READY.json, FAILED.json, and whether they are alive."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from os.path import realpath
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from extractor.core.errors import (
    BadDumpDir,
    ExtractorError,
    PluginError,
    UsageError,
    storage_error,
)
from extractor.core.locations import DEFAULT_DUMP_ROOT, DumpRoot
from extractor.dumps.dump_reader import Rank
from extractor.dumps.dump_root import open_root, rank_directories
from extractor.system.process_id import is_same_process, process_owner
from manifest.causes import LIMIT_ERRNOS
from server_patch.directory import TEMPORARY_PREFIX, Directory
from server_patch.dump_format import (
    FAILED_NAME,
    MAX_DOCUMENT_BYTES,
    READY_NAME,
    DumpFormatError,
    FailedRecord,
    Ready,
    decode_failed,
    decode_ready,
)
from server_patch.settings import DUMP_DIR

#: Begins the names of the files that clients make and remove to see whether they can.
_CLIENT = "client-"


@dataclass(frozen=True, kw_only=True)
class FailedWriter:
    """A writer that says why it captures nothing."""

    path: Path
    boot_id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Writers:
    """Everything that ever announced itself under one dump root and is still there."""

    root: DumpRoot
    alive: tuple[Rank, ...]
    dead: tuple[Rank, ...]
    failed: tuple[FailedWriter, ...]
    unreadable: tuple[str, ...]


def scan_writers(root: DumpRoot) -> Writers:
    """Look at every `<root>/<boot id>/<rank>/`. A missing root is an empty one.

    Raises BadDumpDir for a root that others can change.
    """
    alive: list[Rank] = []
    dead: list[Rank] = []
    failed: list[FailedWriter] = []
    unreadable: list[str] = []
    top = open_root(root)
    for boot_id, rank, directory in () if top is None else rank_directories(top):
        try:
            if isinstance(directory, OSError):
                raise directory
            if (ready := read_ready(directory, boot_id, rank)) is not None:
                found = Rank(directory=directory, ready=ready)
                (alive if is_alive(ready) else dead).append(found)
            elif (record := read_failed(directory)) is not None:
                failed.append(
                    FailedWriter(path=directory.path, boot_id=boot_id, reason=record.reason)
                )
        except (OSError, DumpFormatError) as error:
            if isinstance(error, OSError) and error.errno in LIMIT_ERRNOS:
                raise
            unreadable.append(f"{root.path / boot_id / str(rank)}: {error}")
    return Writers(
        root=root,
        alive=tuple(alive),
        dead=tuple(dead),
        failed=tuple(failed),
        unreadable=tuple(unreadable),
    )


def read_ready(directory: Directory, boot_id: str, rank: int) -> Ready | None:
    """READY.json in the directory of that rank; None where there is none.

    Raises OSError; DumpFormatError also where it names another boot id or rank, or a live process
    of a user who does not write here.
    """
    try:
        ready = decode_ready(directory.read(READY_NAME, max_bytes=MAX_DOCUMENT_BYTES))
    except FileNotFoundError:
        return None
    if (ready.boot_id, ready.rank) != (boot_id, rank):
        raise DumpFormatError(f"{READY_NAME} is of {ready.boot_id[:80]}/{ready.rank}")
    process = ready.process
    owner = process_owner(process.pid, process.namespace) if is_alive(ready) else None
    if owner is not None and directory.owners is not None and owner not in directory.owners:
        raise DumpFormatError(f"{READY_NAME} names process {process.pid} of user {owner}")
    return ready


def read_failed(directory: Directory) -> FailedRecord | None:
    """FAILED.json in the directory of a rank; None where there is none. Raises OSError,
    DumpFormatError."""
    try:
        return decode_failed(directory.read(FAILED_NAME, max_bytes=MAX_DOCUMENT_BYTES))
    except FileNotFoundError:
        return None


def is_alive(ready: Ready) -> bool:
    """Whether the very process that wrote READY.json still runs."""
    return is_same_process(ready.process.pid, ready.process.start_ticks, ready.process.namespace)


def ranks_of(
    writers: Writers, *, url: str, model_path: str, others: Sequence[str] = ()
) -> tuple[Rank, ...]:
    """All data-parallel ranks of the server at `url`.

    They announce its port, and its address where servers share one. Behind a tunnel or a port
    mapping the port differs: then the only live server with that model is used, and the probe
    proves the choice. `others`: addresses of other servers. Raises PluginError, BadDumpDir.
    """
    port, host = urlsplit(url).port, urlsplit(url).hostname
    taken = {urlsplit(other).port for other in others}
    same_port = [rank for rank in writers.alive if rank.ready.process.port == port]
    same_model = [
        rank
        for rank in writers.alive
        if rank.ready.model.path == model_path and rank.ready.process.port not in taken
    ]
    same_address = [rank for rank in same_port if _is_same_host(rank.ready.process.host, host)]
    boots = {rank.ready.boot_id for rank in same_address or same_port or same_model}
    if not boots:
        raise _absent(writers, url)
    # Where only the model is the same, the writer may be of another server.
    if not same_port and (elsewhere := _elsewhere(writers.root.path, url)) is not None:
        raise elsewhere
    if len(boots) > 1:
        raise PluginError(
            f"several live servers dump under {writers.root.path} and none is known to be the one "
            f"at {url}: {', '.join(sorted(boots))}. Give each its own --dump-dir."
        )
    (boot,) = boots
    ranks = sorted(
        (rank for rank in writers.alive if rank.ready.boot_id == boot),
        key=lambda rank: rank.ready.rank,
    )
    _require_whole(ranks, writers)
    return tuple(ranks)


def _require_whole(ranks: Sequence[Rank], writers: Writers) -> None:
    ready = ranks[0].ready
    missing = set(range(ready.engine.dp_size)) - {rank.ready.rank for rank in ranks}
    if missing:
        raise PluginError(
            f"{writers.root.path / ready.boot_id}: data-parallel rank(s) {sorted(missing)} of "
            f"{ready.engine.dp_size} have no live {READY_NAME}; see the server's log"
        )


def _is_same_host(one: str, other: str | None) -> bool:
    try:
        return ip_address(one) == ip_address(other or "")
    except ValueError:
        return one == other


def _absent(writers: Writers, url: str) -> ExtractorError:
    """The error to raise if no writer under the dump root belongs to the server at `url`.

    A directory that no server ever announced itself under is a wrong --dump-dir, unless it is the
    default; the environment of the server's process, if it can be read, names the right one.
    """
    root = writers.root.path
    if (elsewhere := _elsewhere(root, url)) is not None:
        return elsewhere
    if writers.failed:
        reasons = "; ".join(f"{failed.path.name}: {failed.reason}" for failed in writers.failed)
        return PluginError(f"the plugin of a server under {root} gave up: {reasons}")
    if writers.unreadable:
        return PluginError(
            "cannot read what the plugin announced: " + "; ".join(writers.unreadable)
        )
    if writers.dead:
        return PluginError(
            f"the server(s) that announced themselves under {root} are dead "
            f"(pid {', '.join(str(rank.ready.process.pid) for rank in writers.dead)}), and the "
            f"one at {url} did not. Start it with `extractor serve`, or with SGLANG_HS_DUMP_DIR "
            "set."
        )
    if not (writers.alive or root == DEFAULT_DUMP_ROOT or _dump_root_of_server(url)):
        state = "holds no server's dumps" if root.exists() else "does not exist"
        return BadDumpDir(
            f"--dump-dir {root} {state}. Name the directory that the plugin of the server at {url} "
            "dumps under; or, if that server has no plugin, start it with `extractor serve "
            f"--model … --dump-dir {root}`, or with SGLANG_HS_DUMP_DIR={root}."
        )
    return PluginError(
        f"the server at {url} has no plugin that dumps under {root}. "
        "Start it with `extractor serve --model …`; or install hidden-state-extractor in the "
        f"server's environment and set SGLANG_HS_DUMP_DIR={root} for it; or name its "
        "directory with --dump-dir."
    )


def _elsewhere(root: Path, url: str) -> BadDumpDir | None:
    """The error where the server at `url` is known to dump under another directory than `root`."""
    dumps_at = _dump_root_of_server(url)
    if dumps_at is None or realpath(dumps_at) == realpath(root):
        return None
    return BadDumpDir(
        f"the server at {url} dumps under {dumps_at}, not under {root}. Write --dump-dir {dumps_at}"
    )


def _dump_root_of_server(url: str) -> str | None:
    """The dump root in the environment of the process that listens on the port of `url`, if
    readable."""
    parts = urlsplit(url)
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == parts.port:
                if connection.pid is not None:
                    environment = psutil.Process(connection.pid).environ()
                    return environment.get(DUMP_DIR) or None
    return None


def require_dump_directory(ranks: Sequence[Rank]) -> None:
    """Raise UsageError or SpaceError unless this process may create and remove files there."""
    for rank in ranks:
        trial = f"{TEMPORARY_PREFIX}{_CLIENT}{secrets.token_hex(8)}"
        try:
            rank.directory.remove_unfinished(_CLIENT)  # of killed clients
            os.close(rank.directory.create(trial, mode=0o600))
            rank.directory.unlink(trial)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM):
                raise storage_error(error, where=rank.path) from error
            raise UsageError(
                f"{rank.path}: this user cannot create and remove files there ({error}). "
                "Run as the server's user, or start the server with "
                "SGLANG_HS_FILE_MODE=660 and a common group."
            ) from error

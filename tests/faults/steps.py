"""The durable steps of a run by name, and what can be made to happen at them.

A step is an operation on a file of a known kind (the write into an open shard, the rename that
seals it, the removal of a dump), a change of the manifest, or a request. `install` wraps the
functions that the product calls for them, in this process only, and makes `Fault`s happen at the
n-th time that a step is reached, before or after it.
"""

from __future__ import annotations

import errno
import fcntl
import importlib
import os
import re
import signal
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server_patch.directory import Directory

ANY_STEP = "*"
#: Steps at which the product writes to OUT, so that a full disk shows there.
WRITING = ("shard-create", "copy", "shard-sync", "header-write", "seal-trim", "seal-sync",
           "provenance-write", "provenance-sync")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens at one step."""

    step: str
    when: str = "before"  # or "after"
    nth: int = 1  # time that the step is reached, from 1
    action: str = "kill"  # a key of ACTIONS, with its argument behind a colon
    is_lasting: bool = False  # from then on always

    def is_due(self, step: str, when: str, count: int) -> bool:
        if step != self.step and self.step != ANY_STEP:
            return False
        return when == self.when and (count >= self.nth if self.is_lasting else count == self.nth)


# --- what a path is -------------------------------------------------------------------------------

_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("open", re.compile(r"/shards/\.shard-\d+\.open$")),
    ("shards", re.compile(r"/shards$")),
    ("provenance", re.compile(r"/\.dataset\.json\.tmp$")),
    ("out", re.compile(r"/out$")),
    ("trial", re.compile(r"/(\.writable|\.tmp-client-\w+)$")),
    ("dump", re.compile(r"/\d{10}\.(safetensors|error\.json)$")),
)
#: (function of os, kind of file) -> step.
_OPERATIONS: dict[tuple[str, str], str] = {
    ("pwrite", "open"): "copy",
    ("fdatasync", "open"): "shard-sync",
    ("ftruncate", "open"): "seal-trim",
    ("fsync", "open"): "seal-sync",
    ("rename", "open"): "seal-rename",
    ("unlink", "open"): "shard-discard",
    ("fsync", "shards"): "shards-sync",
    ("pwrite", "provenance"): "provenance-write",
    ("fsync", "provenance"): "provenance-sync",
    ("replace", "provenance"): "provenance-rename",
    ("fsync", "out"): "out-sync",
    ("unlink", "dump"): "dump-unlink",
    ("unlink", "trial"): "trial-unlink",
}
_STORE_STEPS = {
    "apply": "manifest-commit",
    "begin": "manifest-begin",
    "add_shard": "manifest-add-shard",
    "seal_shard": "manifest-seal",
    "drop_shard": "manifest-drop",
    "forget_stored": "manifest-forget",
}


def _step_of(
    function: str, target: Any, real_readlink: Callable[[str], str], directory: int | None
) -> str | None:
    path = os.fspath(target) if not isinstance(target, int) else _path_of(target, real_readlink)
    if directory is not None:
        path = f"{_path_of(directory, real_readlink)}/{path}"
    for kind, pattern in _KINDS:
        if pattern.search(str(path)):
            return _OPERATIONS.get((function, kind))
    return None


def _path_of(descriptor: int, real_readlink: Callable[[str], str]) -> str:
    try:
        return real_readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


# --- what happens ---------------------------------------------------------------------------------


class Steps:
    """Counts steps, writes them to a trace, and makes the faults of a plan happen."""

    def __init__(self, plan: Sequence[Fault], trace: Path, server_pid: int) -> None:
        self._plan = tuple(plan)
        self._server_pid = server_pid
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        self._trace = os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    @contextmanager
    def at(self, step: str, subject: Any = None) -> Iterator[None]:
        self.reach(step, "before", subject)
        yield
        self.reach(step, "after", subject)

    def reach(self, step: str, when: str, subject: Any = None) -> None:
        for fault in self.due(step, when):
            self.happen(fault, subject)

    def due(self, step: str, when: str) -> list[Fault]:
        with self._lock:
            self._counts[step, when] += 1
            self._counts[ANY_STEP, when] += 1
            found = [
                fault
                for fault in self._plan
                if fault.is_due(step, when, self._counts[fault.step, when])
            ]
        if when == "before":
            os.write(self._trace, f"{step}\n".encode())
        return found

    def happen(self, fault: Fault, subject: Any) -> None:
        os.write(self._trace, f"! {fault.action} {fault.when} {fault.step}\n".encode())
        action, _, argument = fault.action.partition(":")
        match action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "kill-server":
                os.kill(self._server_pid, signal.SIGKILL)
            case "kill-both":
                os.kill(self._server_pid, signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            case "signal":
                os.kill(os.getpid(), getattr(signal, f"SIG{argument}"))
            case "raise":
                number = getattr(errno, argument)
                raise OSError(number, os.strerror(number))
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "dump":
                _damage_dump(Path(subject), argument)
            case _:
                raise ValueError(f"no action {fault.action!r}")


def _damage_dump(path: Path, how: str) -> None:
    """What may become of a dump between the moment it is seen and its copy."""
    data = path.read_bytes()
    match how:
        case "delete":
            path.unlink()
        case "truncate":
            os.truncate(path, len(data) - 3)
        case "empty":
            os.truncate(path, 0)
        case "zero":
            path.write_bytes(bytes(len(data)))
        case "flip":  # in the last token id: nothing else of a dump is known beforehand
            path.write_bytes(data[:-4] + bytes([data[-4] ^ 1]) + data[-3:])
        case "nan":
            (header,) = (int.from_bytes(data[:8], "little") + 8,)
            path.write_bytes(data[:header] + b"\xff\xff" + data[header + 2 :])
        case "swap":
            others = sorted(p for p in path.parent.glob("*.safetensors") if p != path)
            if others:
                other = others[0].read_bytes()
                others[0].write_bytes(data)
                path.write_bytes(other)
            else:
                path.write_bytes(data[::-1])
        case _:
            raise ValueError(f"no damage {how!r}")


# --- installing -----------------------------------------------------------------------------------


def install(plan: Sequence[Fault], trace: Path, server_pid: int) -> None:
    """Wrap everything that makes a step, in this process, for good."""
    steps = Steps(plan, trace, server_pid)
    for function in ("pwrite", "fdatasync", "fsync", "ftruncate", "rename", "replace", "unlink"):
        _wrap_os(function, steps)
    _wrap_open(steps)
    _wrap_store(steps)
    _wrap_rest(steps)


def _wrap_os(function: str, steps: Steps) -> None:
    real, readlink = getattr(os, function), os.readlink

    def wrapper(target: Any, *args: Any, **kwargs: Any) -> Any:
        step = _step_of(function, target, readlink, kwargs.get("dir_fd", kwargs.get("src_dir_fd")))
        if step == "copy" and args[1] == 0:
            step = "header-write"
        if step is None:
            return real(target, *args, **kwargs)
        for fault in steps.due(step, "before"):
            if fault.action == "tear":
                # Anew: a direct write could not end within a block.
                torn = os.open(f"/proc/self/fd/{target}", os.O_WRONLY)
                real(torn, bytes(args[0])[: len(args[0]) // 2], args[1])
                fault = Fault(step=step, action="kill")
            steps.happen(fault, target)
        result = real(target, *args, **kwargs)
        steps.reach(step, "after", target)
        return result

    _put(os, function, wrapper)


def _wrap_open(steps: Steps) -> None:
    real = os.open

    def wrapper(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT and re.search(r"/shards/\.shard-\d+\.open$", os.fspath(path)):
            with steps.at("shard-create", path):
                return real(path, flags, *args, **kwargs)
        return real(path, flags, *args, **kwargs)

    _put(os, "open", wrapper)


def _wrap_store(steps: Steps) -> None:
    from manifest.store import Store

    for method, step in _STORE_STEPS.items():
        _wrap_method(Store, method, step, steps)
    real = Store.create_or_open

    def create_or_open(path: Path) -> Store:
        store = real(path)
        _hook_rows(store._db.conn, steps)
        return store

    _put(Store, "create_or_open", create_or_open)


def _hook_rows(connection: sqlite3.Connection, steps: Steps) -> None:
    """manifest-inside: SQLite is about to write a row of a transaction, or has written it."""
    connection.create_function("reach_inside", 1, lambda when: steps.reach("manifest-inside", when))
    for when, moment in (
        ("before", "BEFORE INSERT"), ("after", "AFTER INSERT"), ("after", "AFTER UPDATE"),
    ):  # fmt: skip
        connection.execute(
            f"CREATE TEMP TRIGGER {moment.lower().replace(' ', '_')} {moment} ON main.prompts "
            f"BEGIN SELECT reach_inside('{when}'); END"
        )


def _wrap_method(owner: type, method: str, step: str, steps: Steps) -> None:
    real = getattr(owner, method)

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        with steps.at(step):
            return real(self, *args, **kwargs)

    _put(owner, method, wrapper)


def _wrap_rest(steps: Steps) -> None:
    import extractor.dumps.dump_reader
    from extractor.servers.client import Client
    from server_patch.dump_format import read_beginning

    generate, flock = Client.generate, fcntl.flock

    def seen(directory: Directory, name: str, **options: int) -> Any:
        with steps.at("dump-seen", directory.path / name):
            return read_beginning(directory, name, **options)

    async def send(self: Client, request: Any) -> Any:
        with steps.at("request"):
            return await generate(self, request)

    def lock(descriptor: int, operation: int) -> None:
        with steps.at("lock"):
            flock(descriptor, operation)

    _put(extractor.dumps.dump_reader, "read_beginning", seen)
    _put(Client, "generate", send)
    _put(fcntl, "flock", lock)


def patch(patches: Mapping[str, Any]) -> None:
    """Replace what the operating system says, such as the time: `module.NAME` -> a stand-in."""
    for name, value in patches.items():
        module, _, function = name.rpartition(".")
        _put(importlib.import_module(module), function, value)


def _put(owner: object, name: str, value: object) -> None:
    """In place of what `owner` has under that name. Raises AttributeError where it has nothing."""
    getattr(owner, name)
    setattr(owner, name, value)

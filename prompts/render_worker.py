"""The worker process: runs a chat template and a tokenizer, which others wrote, within limits.

The operating system enforces them, so that they hold whatever the code does: an interval timer
whose signal ends the process, also in native code that never returns, and a limit of its memory.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import ModuleType
from typing import Any, NoReturn

import numpy as np

from prompts.render import Renderer
from prompts.tokenizer import check_template
from prompts.types import TokenizerError
from prompts.worker_messages import (
    CodeLimits,
    Message,
    dumps,
    loaded_bound,
    loaded_limits,
    loaded_options,
    loaded_rows,
    loads,
    result_of,
)

#: Of what an exception says.
_MAX_CHARS = 160


def main(requests: int, answers: int) -> NoReturn:
    """Answer each request of the client, until it is gone. The arguments are pipes."""
    # A signal for all processes of a command (Ctrl-C, the end of a service) is for the client to
    # act on: it drains, and needs its workers for that.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each process is one of several already
    sys.meta_path[:] = [_WithoutTorch if one is PathFinder else one for one in sys.meta_path]
    inbox: SimpleQueue[Message] = SimpleQueue()
    reader = Connection(requests, writable=False)
    # Requests are read while others are worked on, so that the client never waits to send one; and
    # the end of the client is noticed.
    threading.Thread(target=_read, args=(reader, inbox), name="requests", daemon=True).start()
    writer = Connection(answers, readable=False)
    worker = _LimitedRenderer()
    while True:
        answer = worker.answer(inbox.get())
        writer.send_bytes(dumps(answer))
        if answer[0] == "raised":  # what it left behind, such as a poisoned lock, is unknown
            os._exit(1)


def _read(reader: Connection, inbox: SimpleQueue[Message]) -> None:
    try:
        while True:
            inbox.put(loads(reader.recv_bytes()))
    except BaseException:
        pass
    os._exit(0)


class _WithoutTorch(PathFinder):
    """Hides torch from transformers: tokenizers do not need it, and it takes seconds to import."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if fullname == "torch" else super().find_spec(fullname, path, target)


class _LimitedRenderer:
    def __init__(self) -> None:
        self._renderer: Renderer | None = None
        self._limits = CodeLimits()

    def answer(self, request: Message) -> Message:
        try:
            return self._answer(*request)
        except TokenizerError as error:
            return "refused", str(error)
        except BaseException as error:  # also SystemExit, and the panics of the tokenizers library
            return "raised", self._complaint(error)

    def _answer(self, kind: str, *values: Any) -> Message:
        match kind:
            case "load":
                source, options, bound, limits = values
                self._limits = loaded_limits(limits)
                return self._load(source, options, bound)
            case "check":
                template, limits = values
                self._limits = loaded_limits(limits)
                limit_memory(self._limits.memory_bytes)
                with _limited(self._limits.load_s):
                    check_template(template)
                return ("checked",)
            case "rows":
                assert self._renderer is not None
                rows = loaded_rows(values[0])
                with _limited(self._limits.row_s):
                    items = self._renderer.prompts_from(rows)
                return "rows", list(map(result_of, items))
            case "decode":
                assert self._renderer is not None and self._renderer.tokenizer is not None
                decode = self._renderer.tokenizer.decode
                with _limited(self._limits.row_s):
                    texts = [decode(np.frombuffer(ids, np.int32).tolist()) for ids in values[0]]
                return "texts", texts
            case _:
                raise ValueError(f"unknown request {kind}")

    def _load(self, source: str, options: Any, bound: Any) -> Message:
        limit_memory(self._limits.memory_bytes)
        with _limited(self._limits.load_s):
            renderer = Renderer.load(source, loaded_options(options), bound=loaded_bound(bound))
            facts = (renderer.tokenizer_digest, renderer.template_digest, renderer.now)
        limit_memory(self._limits.memory_bytes)  # beyond what loading took
        self._renderer = renderer
        return "loaded", facts

    def _complaint(self, error: BaseException) -> str:
        if isinstance(error, MemoryError):
            return f"needed more than {self._limits.memory_bytes / 2**30:g} GiB of memory"
        line = str(error).strip().partition("\n")[0]
        return f"raised {type(error).__name__}: {line}"[:_MAX_CHARS]


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """End this process by SIGALRM if the block takes longer."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def limit_memory(more_bytes: int) -> None:
    """Let this process allocate so much more than it has; then, allocations fail."""
    with open("/proc/self/statm", "rb") as file:
        has_bytes = int(file.read().split()[5]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = has_bytes + more_bytes
    if most != resource.RLIM_INFINITY:
        wanted = min(wanted, most)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, most))

"""Edge: what SIGINT, SIGTERM and SIGHUP do to a command, from its first line to its last."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Final, TypeVar

from extractor.errors import Interrupted

Result = TypeVar("Result")

#: A person's Ctrl-C, a job scheduler's end of time, a terminal that went away.
STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopHandler:
    """One for a command. What a signal does depends on how far the command is:

    | while | the signal |
    |---|---|
    | a run is going on (`asks_first`) | asks it to end in order |
    | it is asked already, or anything else is going on | cancels the command, which cleans up |
    | all is cleaned up, but a thread is still waited for | ends the process |
    """

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        self._stop: asyncio.Event | None = None

    def install(self) -> None:
        """Handle the signals even where SIGINT was ignored, as in the background of a script."""
        for number in STOP_SIGNALS:
            with suppress(RuntimeError, ValueError):  # not the main thread: no signals come here
                asyncio.get_running_loop().add_signal_handler(number, self.handle)

    def remove(self) -> None:
        for number in STOP_SIGNALS:
            with suppress(RuntimeError, ValueError):
                asyncio.get_running_loop().remove_signal_handler(number)

    def handle(self) -> None:
        if self._task.done():
            # A thread cannot be stopped: an import, a long file being read.
            os._exit(Interrupted.exit_code)
        elif self._stop is not None and not self._stop.is_set():
            self._stop.set()
        else:
            self._task.cancel()

    @contextmanager
    def asks_first(self, stop: asyncio.Event) -> Iterator[None]:
        """Within the block, the first signal only sets `stop`."""
        self._stop = stop
        try:
            yield
        finally:
            self._stop = None


_current: ContextVar[StopHandler | None] = ContextVar("stop_handler", default=None)


async def under_signals(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Await `coroutine`, whose task the signals cancel. For the whole of a command: the handler
    stays until its event loop is closed."""
    task = asyncio.current_task()
    assert task is not None
    handler = StopHandler(task)
    handler.install()
    _current.set(handler)
    return await coroutine


@contextmanager
def stop_on_signals(stop: asyncio.Event) -> Iterator[None]:
    """Within the block, the first of STOP_SIGNALS sets `stop`; the next cancels the command, or,
    where there is none, the current task."""
    handler = _current.get()
    if handler is not None:
        with handler.asks_first(stop):
            yield
        return
    task = asyncio.current_task()
    assert task is not None
    handler = StopHandler(task)
    handler.install()
    try:
        with handler.asks_first(stop):
            yield
    finally:
        handler.remove()

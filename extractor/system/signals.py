"""Edge: what SIGINT, SIGTERM and SIGHUP do to a command, from its first line to its last."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Final, TypeVar

from extractor.core.errors import Interrupted
from extractor.core.timings import DEFAULT_TIMINGS

Result = TypeVar("Result")

#: A person's Ctrl-C, a job scheduler's end of time, a terminal that went away.
STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopHandler:
    """Stops a command on a signal. The effect of a signal depends on the command's progress:

    | while | the signal |
    |---|---|
    | a run is going on (`asks_first`) | asks it to end in order |
    | it is asked already, or anything else is going on | cancels the command, which cleans up |
    | all is cleaned up, but a thread is still waited for | ends the process |

    `end_s` after the first signal, a timer thread calls `end` in any case, since a disk or a server
    may block the command for ever.
    """

    def __init__(
        self,
        task: asyncio.Task[Any],
        *,
        end: Callable[[], None] | None = None,
        end_s: float = DEFAULT_TIMINGS.stop.end_s,
    ) -> None:
        self._task = task
        self._end = end
        self._end_s = end_s
        self._stop: asyncio.Event | None = None
        self._first_at: float | None = None  # time.monotonic() of the first signal

    @property
    def left_s(self) -> float:
        """Seconds until `end` is called; infinite before the first signal."""
        if self._first_at is None:
            return float("inf")
        return max(0.0, self._first_at + self._end_s - time.monotonic())

    def install(self) -> None:
        """Handle the signals even where SIGINT was ignored, as in the background of a script; but
        not SIGHUP where `nohup` had it ignored."""
        for number in STOP_SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            with suppress(RuntimeError, ValueError):  # not the main thread: no signals come here
                asyncio.get_running_loop().add_signal_handler(number, self.handle)

    def remove(self) -> None:
        for number in STOP_SIGNALS:
            with suppress(RuntimeError, ValueError):
                asyncio.get_running_loop().remove_signal_handler(number)

    def handle(self) -> None:
        if self._first_at is None:
            self._first_at = time.monotonic()
            if self._end is not None:
                timer = threading.Timer(self._end_s, self._end)
                timer.daemon = True  # the command may exit earlier
                timer.start()
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


def patience_s(wanted: float, *, keep_s: float = 0.0) -> float:
    """Seconds to wait: `wanted`, but after a signal at most the handler's `left_s` minus `keep_s`.

    `keep_s`: time to reserve for later shutdown steps.
    """
    handler = _current.get()
    return wanted if handler is None else max(0.0, min(wanted, handler.left_s - keep_s))


async def to_its_end(
    work: Coroutine[Any, Any, None], *, hurry: Callable[[], None] = lambda: None
) -> None:
    """Await `work` to its end even if cancelled; a cancellation calls `hurry`, and is raised."""
    task = asyncio.create_task(work)
    is_cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            is_cancelled = True
            hurry()
    await task
    if is_cancelled:
        raise asyncio.CancelledError


async def under_signals(
    coroutine: Coroutine[Any, Any, Result],
    *,
    end: Callable[[], None] | None = None,
    end_s: float = DEFAULT_TIMINGS.stop.end_s,
) -> Result:
    """Await `coroutine` in a task that stop signals cancel.

    Meant for a whole command: the handler stays until the event loop is closed. `end`: ends the
    process, `end_s` after the first signal.
    """
    task = asyncio.current_task()
    assert task is not None
    handler = StopHandler(task, end=end, end_s=end_s)
    handler.install()
    _current.set(handler)
    return await coroutine


@contextmanager
def handlers_put_back() -> Iterator[None]:
    """Restore the handlers of the signals behind the block: an event loop that is closed leaves the
    system's."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            with suppress(ValueError):  # not the main thread
                signal.signal(number, handler)


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

"""Edge: what SIGINT, SIGTERM and SIGHUP do to a run."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

#: A person's Ctrl-C, a job scheduler's end of time, a terminal that went away.
STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stop_on_signals(stop: asyncio.Event) -> Iterator[None]:
    """Within the block, each of STOP_SIGNALS sets `stop`; a second one cancels the current task.

    After the block either cancels it, as outside of a run.
    """
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    assert main is not None

    def handle() -> None:
        if stop.is_set():
            main.cancel("interrupted twice")
        stop.set()

    installed: list[signal.Signals] = []
    for number in STOP_SIGNALS:
        with suppress(RuntimeError, ValueError):  # not the main thread: no signals come here
            loop.add_signal_handler(number, handle)
            installed.append(number)
    try:
        yield
    finally:
        for number in installed:
            loop.add_signal_handler(number, main.cancel)

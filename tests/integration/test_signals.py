"""What each further signal does."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from extractor.core.errors import Interrupted
from extractor.system.signals import (
    STOP_SIGNALS,
    StopHandler,
    handlers_put_back,
    patience_s,
    stop_on_signals,
    to_its_end,
    under_signals,
)


async def send(number: signal.Signals) -> None:
    """A signal to ourselves, and a turn of the loop to handle it."""
    os.kill(os.getpid(), number)
    await asyncio.sleep(0.01)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_asks_and_the_second_cancels(number: signal.Signals) -> None:
    reached: list[str] = []

    async def command() -> None:
        stop = asyncio.Event()
        with stop_on_signals(stop):
            await send(number)
            reached.append("asked" if stop.is_set() else "not asked")
            await send(number)
            reached.append("not cancelled")

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(under_signals(command()))
    assert reached == ["asked"]


def test_before_and_behind_a_run_the_first_signal_cancels() -> None:
    reached: list[str] = []

    async def command() -> None:
        with stop_on_signals(asyncio.Event()):
            pass
        try:
            await send(signal.SIGTERM)
        except asyncio.CancelledError:
            reached.append("cancelled")
            # While that is cleaned up, another one may cut it short.
            await send(signal.SIGTERM)
            reached.append("not cancelled again")

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(under_signals(command()))
    assert reached == ["cancelled"]


def test_a_signal_ends_a_process_that_only_waits_for_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Ended(Exception):
        pass

    def end(status: int) -> None:
        assert status == Interrupted.exit_code
        raise Ended

    monkeypatch.setattr(os, "_exit", end)

    async def main() -> None:
        task = asyncio.create_task(asyncio.sleep(0))
        await task
        with pytest.raises(Ended):
            StopHandler(task).handle()

    asyncio.run(main())


async def test_outside_of_a_command_the_handlers_come_off_again() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signals(asyncio.Event()):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


async def test_a_hangup_that_nohup_has_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = asyncio.Event()
        with stop_on_signals(stop):
            await send(signal.SIGHUP)
            assert not stop.is_set()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_behind_an_event_loop_the_handlers_are_those_of_before() -> None:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with handlers_put_back():
            asyncio.run(under_signals(asyncio.sleep(0)))
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) == signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


# --- the time limit after a signal --------------------------------------------------------------


def test_the_process_is_ended_after_a_signal_even_if_everything_hangs() -> None:
    ends: list[str] = []
    ended = threading.Event()

    def end() -> None:
        ends.append(threading.current_thread().name)
        ended.set()

    async def command() -> None:
        with stop_on_signals(asyncio.Event()):
            assert not ended.wait(0.1)  # never called without a signal
            await send(signal.SIGTERM)
            assert ended.wait(30)  # blocks the event loop meanwhile
            await asyncio.sleep(0.1)

    asyncio.run(under_signals(command(), end=end, end_s=0.05))
    assert len(ends) == 1
    assert ends != [threading.main_thread().name]


def test_after_a_signal_patience_is_limited_to_the_remaining_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr("extractor.system.signals.time.monotonic", lambda: now)
    assert patience_s(15.0, keep_s=4.0) == 15.0  # outside of a command
    found: list[float] = []

    async def command() -> None:
        nonlocal now
        found.append(patience_s(15.0, keep_s=4.0))
        with stop_on_signals(asyncio.Event()):
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(3):
                await asyncio.sleep(0)
        for seconds in (0.0, 6.0, 13.0, 16.0):
            now = 1000.0 + seconds
            found.append(patience_s(15.0, keep_s=4.0))

    asyncio.run(under_signals(command(), end_s=18.0))
    assert found == [15.0, 14.0, 8.0, 1.0, 0.0]


async def test_cancelled_work_is_finished_before_the_cancellation_is_raised() -> None:
    done: list[str] = []
    may_end = asyncio.Event()

    async def work() -> None:
        await may_end.wait()
        done.append("done")

    task = asyncio.create_task(to_its_end(work(), hurry=may_end.set))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == ["done"]

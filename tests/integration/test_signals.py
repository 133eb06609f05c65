"""What each further signal does."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from extractor.errors import Interrupted
from extractor.signals import STOP_SIGNALS, StopHandler, stop_on_signals, under_signals


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

"""The life of one prompt: attempts, until its sample is stored or it is given up."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from extractor.dispatch.budget import Budget
from extractor.dispatch.connection import Connection
from extractor.dispatch.retry import RetryPolicy, Setbacks
from extractor.dispatch.row_recorder import RowRecorder
from extractor.dispatch.server_pool import FailedAttempt, ServerPool
from extractor.shards.mover_pool import MoverPool
from prompts.types import BadRow, Prompt


@dataclass(frozen=True, kw_only=True)
class PromptTasks:
    """Gives each prompt a task, within the byte budget."""

    pool: ServerPool
    movers: MoverPool
    recorder: RowRecorder
    budget: Budget
    dump_bytes: Callable[[int], int]  # most bytes of dumps of that many tokens
    policy: RetryPolicy
    stop: asyncio.Event  # no further attempt

    async def start(
        self,
        work: asyncio.TaskGroup,
        prompt: Prompt,
        row: Prompt | BadRow,
        *,
        settle: Callable[[], Awaitable[None]],
    ) -> None:
        """Wait for the bytes of the prompt's dumps, and run `settle` in a task that holds them.

        `row`: the prompt before it was cut.
        """
        size_bytes = self.dump_bytes(prompt.num_tokens)
        await self.budget.take(size_bytes)
        if self.stop.is_set():
            self.budget.give_back(size_bytes)
            return

        async def hold() -> None:
            try:
                await settle()
            finally:
                self.budget.give_back(size_bytes)

        self.recorder.plan(prompt, row)
        work.create_task(hold(), name=f"prompt-{prompt.ordinal}")

    async def settle(self, prompt: Prompt, *, attempts_before: int) -> None:
        """Return when `prompt` is stored or given up, or when the run stops.

        `attempts_before`: in earlier sessions.
        """
        attempt = attempts_before
        setbacks = Setbacks()
        served: dict[Connection, int] = {}
        while not self.stop.is_set():
            attempt += 1
            failed = await self._attempt(prompt, attempt, served)
            if failed is None:
                return
            setbacks.add(failed.failure, others_served=failed.others_served)
            if self.policy.gives_up(failed.failure, setbacks):
                self.pool.forget(prompt.ordinal)
                self.recorder.give_up(prompt, failed.failure, attempts=attempt)
                return
            self.recorder.retry(prompt, failed.failure, attempts=attempt)
            delay_s = self.policy.delay_s(setbacks.total, chance=random.random())
            # Others may be sent meanwhile: a prompt that is always refused must not block them.
            async with self.budget.lent(self.dump_bytes(prompt.num_tokens)):
                with suppress(TimeoutError):
                    async with asyncio.timeout(delay_s):
                        await self.stop.wait()

    async def _attempt(
        self, prompt: Prompt, attempt: int, served: dict[Connection, int]
    ) -> FailedAttempt | None:
        """One attempt; None if the prompt is settled, or not to be sent any more."""
        outcome = await self.pool.fetch(prompt, attempt, served)
        if outcome is None or isinstance(outcome, FailedAttempt):
            return outcome
        failure = await self.movers.store(prompt, outcome, attempts=attempt)
        return None if failure is None else FailedAttempt(failure=failure, others_served=False)

"""The life of one prompt: attempts, until its sample is stored or it is given up."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from extractor.core.failure import Failure
from extractor.dispatch.retry import RetryPolicy, Setbacks
from extractor.dispatch.row_recorder import RowRecorder
from extractor.dispatch.server_pool import FailedAttempt, ServerPool
from extractor.dumps.dump_reader import DumpPiece
from extractor.shards.mover import Movers
from prompts.types import Prompt


@dataclass(frozen=True, kw_only=True)
class PromptTasks:
    """Sends prompts and stores what comes back, with retries where they may help."""

    pool: ServerPool
    movers: Movers
    recorder: RowRecorder
    policy: RetryPolicy
    stop: asyncio.Event  # no further attempt

    async def settle(self, prompt: Prompt, *, attempts_before: int) -> None:
        """Return when `prompt` is stored or given up, or when the run stops.

        `attempts_before`: in earlier sessions.
        """
        attempt = attempts_before
        setbacks = Setbacks()
        while not self.stop.is_set():
            attempt += 1
            failed = await self._attempt(prompt, attempt)
            if failed is None:
                return
            setbacks.add(failed.failure, others_served=failed.others_served)
            if self.policy.gives_up(failed.failure, setbacks):
                self.pool.forget(prompt.ordinal)
                self.recorder.give_up(prompt, failed.failure, attempts=attempt)
                return
            self.recorder.retry(prompt, failed.failure, attempts=attempt)
            delay_s = self.policy.delay_s(setbacks.total, chance=random.random())
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self.stop.wait()

    async def _attempt(self, prompt: Prompt, attempt: int) -> FailedAttempt | None:
        """One attempt; None if the prompt is settled, or not to be sent any more."""
        outcome = await self.pool.fetch(prompt, attempt)
        if outcome is None or isinstance(outcome, FailedAttempt):
            return outcome
        failure = await self.store(prompt, outcome, attempts=attempt)
        return None if failure is None else FailedAttempt(failure=failure, others_served=False)

    async def store(
        self, prompt: Prompt, pieces: Sequence[DumpPiece], *, attempts: int
    ) -> Failure | None:
        """Make a sample durable; why the dumps are no good, if they are not."""
        return await self.movers.store(prompt, pieces, attempts=attempts)

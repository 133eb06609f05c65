"""The life of one prompt: attempts, until its sample is stored or it is given up."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from extractor.budget import Budget
from extractor.collect import DumpPiece
from extractor.collector import Collected
from extractor.fleet import Fleet
from extractor.ledger import Ledger
from extractor.mover import Movers
from extractor.retry import Failure, Remedy, RetryPolicy
from manifest.states import Reason
from prompts.types import Prompt


@dataclass(frozen=True, kw_only=True)
class Attempts:
    """Sends prompts and stores what comes back, again and again where that may help."""

    fleet: Fleet
    movers: Movers
    ledger: Ledger
    budget: Budget  # bytes under the dump root
    policy: RetryPolicy
    stop: asyncio.Event  # no further attempt

    async def settle(self, prompt: Prompt, size_bytes: int, *, attempts_before: int) -> None:
        """Return when `prompt` is stored or given up, or when the run stops.

        size_bytes: what its dumps may take. attempts_before: in earlier sessions.
        """
        attempt = attempts_before
        setbacks = 0  # of this session
        counted = 0  # setbacks that were this prompt's own
        telling = 0  # setbacks while others were served, or its own
        while not self.stop.is_set():
            attempt += 1
            async with self.budget.hold(size_bytes):
                if self.stop.is_set():
                    return
                outcome = await self.fleet.fetch(prompt, attempt)
                if outcome is None:
                    return
                failure = await self._kept(prompt, outcome, attempt)
            if failure is None:
                return
            setbacks += 1
            counted += not failure.is_not_counted
            telling += failure.is_telling
            remedy = self.policy.remedy(failure, num_counted=counted, num_setbacks=telling)
            if remedy is Remedy.GIVE_UP:
                self.fleet.forget(prompt.ordinal)
                if failure.reason is Reason.KILLS_SERVER:
                    attempt -= 1  # that was found out before anything was sent
                self.ledger.give_up(prompt, failure, attempts=attempt)
                return
            self.ledger.retry(prompt, attempts=attempt)
            delay_s = self.policy.delay_s(setbacks, chance=random.random())
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self.stop.wait()

    async def _kept(self, prompt: Prompt, outcome: Collected, attempt: int) -> Failure | None:
        """None when the sample is durable, else why this attempt gave none."""
        if isinstance(outcome, Failure):
            return outcome
        return await self.movers.store(prompt, outcome, attempts=attempt)

    async def adopt(self, prompt: Prompt, pieces: Sequence[DumpPiece], *, attempts: int) -> bool:
        """Store what an earlier session asked for; whether it was good."""
        return await self.movers.store(prompt, pieces, attempts=attempts) is None

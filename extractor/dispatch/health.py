"""Edge: how many prompts a server gets, by how it does; and when to give it up."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

from extractor.core.checks import ReplyFacts, check_reply
from extractor.core.errors import ServerGone, ServerLost, SpaceError
from extractor.core.events import Report
from extractor.core.failure import Failure
from extractor.core.timings import DEFAULT_TIMINGS
from extractor.dispatch.breaker import Breaker
from extractor.dispatch.limiter import Limiter
from extractor.dispatch.retry import RetryPolicy
from extractor.dispatch.scheduler import Gate, Turns
from extractor.dumps.collector import Collected, Collector
from extractor.dumps.discovery import is_alive
from extractor.servers.client import Client
from extractor.servers.probe import PROBE_TOKENS, probe_ids, probe_request
from extractor.servers.target import Target

#: A server that answers nothing for this long is taken for dead although its process lives.
GONE_AFTER_S = 30.0
#: One that answers but serves nothing (refusals, errors, time-outs) gets longer to recover.
USELESS_AFTER_S = 600.0
#: Refusals of every prompt for so long stop the sending of prompts.
REFUSED_OPEN_S = 10.0
#: Refusals of every prompt for so long are checked with a probe.
TRIAL_AFTER_S = 30.0
#: So long a dump root that somebody else filled may stay full.
SPACE_PATIENCE_S = 60.0
ALIVE_INTERVAL_S = 0.5
#: Between questions whether it is being stopped, while it has prompts.
DRAIN_INTERVAL_S = 5.0
RESTART_ADVICE = "Restart it and run the same command again; nothing stored is sent twice."


class ServerWatch:
    """One start of one server: opens and shuts its gate, by what its replies say of it."""

    def __init__(
        self,
        *,
        client: Client,
        target: Target,
        run_id: str,
        limiter: Limiter,
        turns: Turns,
        collector: Collector,
        report: Report,
    ) -> None:
        """report: logs what the run waits for."""
        self._report = report
        self._client = client
        self._target = target
        self._run_id = run_id
        self._breaker = Breaker(
            refused_open_s=REFUSED_OPEN_S,
            gone_after_s=GONE_AFTER_S,
            useless_after_s=USELESS_AFTER_S,
        )
        self.limiter = limiter
        self.gate = Gate(limit=limiter.limit)
        self._turns = turns
        self._collector = collector
        self._has_opened = asyncio.Event()  # the circuit: no prompt may be sent
        self._found_gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._draining_since: float | None = None  # it is being stopped, and said so
        self._last_trouble = ""
        self._space_trouble: str | None = None
        self._space_trouble_since = 0.0
        self.num_served = 0  # requests answered with what was asked for, probes included

    @property
    def is_draining(self) -> bool:
        """Whether it is being stopped: its end is no prompt's fault."""
        return self._draining_since is not None

    def is_same_server(self) -> bool:
        """Whether the server that was proven is still the one behind the address.

        To be asked before a prompt is sent: another may have taken the address since. Where it is
        not, `run` ends as soon as it can.
        """
        if self._breaker.is_gone:
            try:
                self._require_alive()
            except ServerGone as error:
                if not self._found_gone.done():
                    self._found_gone.set_exception(error)
                    self._found_gone.exception()  # known, though nobody may be watching any more
                return False
        return True

    def note(
        self, failure: Failure | None, *, sent_at: float, num_tokens: int | None = None
    ) -> None:
        """Learn from how a request ended; `sent_at` in the loop's time.

        failure: None if it was served. num_tokens: the prompt's length; None for a probe, which is
        no measure of speed.
        """
        now = asyncio.get_running_loop().time()
        was_open = self._breaker.is_open
        if failure is None:
            self._breaker.served()
            self.num_served += 1
        else:
            if failure.is_busy:
                self._breaker.refused(now=now)
                self.limiter.refused(now=now, sent_at=sent_at)
            elif failure.is_unserved:
                self._breaker.unserved(now=now, is_gone=failure.is_transport)
            else:
                self._breaker.served()  # it refused this prompt, as is its business
            self._last_trouble = failure.detail
        if was_open and not self._breaker.is_open:
            self.limiter.restart(now=now)
        elif num_tokens is not None and failure is None:
            self.limiter.served(now=now, num_tokens=num_tokens, in_flight=self.gate.num_in_flight)
        self._set_gate()

    def _set_gate(self) -> None:
        self.gate.limit = self.limiter.limit
        was_open = self.gate.is_open
        self.gate.is_open = not (self._breaker.is_open or self.is_draining)
        if self._breaker.is_open:
            self._has_opened.set()
        if was_open != self.gate.is_open:
            self._tell_gate()
        self._turns.wake()

    def _tell_gate(self) -> None:
        """That the gate was opened or shut, and why."""
        url = self._client.url
        if self.gate.is_open:
            self._report(f"the server at {url} serves again", event="server_back", server=url)
        elif self._breaker.is_open:
            self._report(
                f"the server at {url} serves nothing (last: {self._last_trouble}); its prompts "
                "wait, and a probe goes on asking",
                event="server_silent",
                level="warning",
                server=url,
            )
        else:
            self._report(
                f"the server at {url} is being stopped; it gets no more prompts, so that it can "
                "end",
                event="server_stopping",
                level="warning",
                server=url,
            )

    def note_space(self, problem: str | None) -> None:
        """Learn whether the last dump found no room under the dump root."""
        if problem is None:
            self._space_trouble = None
        elif self._space_trouble is None:
            self._space_trouble = problem
            self._space_trouble_since = asyncio.get_running_loop().time()

    async def run(self) -> None:
        """Watch until cancelled. Raises ServerLost, SpaceError."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch(), name="server-alive")
            tasks.create_task(self._try_again_and_again(), name="server-trial")
            tasks.create_task(self._ask_again_and_again(), name="server-drain")
            await self._found_gone

    async def _watch(self) -> None:
        while True:
            now = asyncio.get_running_loop().time()
            self._require_alive()
            if self._breaker.is_hopeless(now=now):
                raise self._given_up(now)
            if self._draining_since is not None and now - self._draining_since > USELESS_AFTER_S:
                raise ServerLost(
                    f"the server at {self._client.url} is being stopped, and has not ended in "
                    f"{now - self._draining_since:.0f} s",
                    "See its log; the same command goes on.",
                )
            if self._space_trouble and now - self._space_trouble_since > SPACE_PATIENCE_S:
                raise SpaceError(
                    f"{self._space_trouble} Nothing is lost: free space (`extractor doctor` lists "
                    "leftovers) and run the same command again."
                )
            await asyncio.sleep(ALIVE_INTERVAL_S)

    def _require_alive(self) -> None:
        for rank in self._target.ranks:
            if not is_alive(rank.ready):
                how = "was stopped" if self.is_draining else "died"
                raise ServerGone(
                    f"the server at {self._client.url} {how}: its process "
                    f"{rank.ready.process.pid} is gone",
                    RESTART_ADVICE,
                )

    def _given_up(self, now: float) -> ServerLost:
        trouble = f"{self._breaker.trouble_s(now=now):.0f} s (last: {self._last_trouble})"
        if self._breaker.is_gone:
            return ServerGone(
                f"the server at {self._client.url} has not answered for {trouble}", RESTART_ADVICE
            )
        return ServerLost(
            f"the server at {self._client.url} answers, but has served nothing for {trouble}",
            "See its log; the same command goes on.",
        )

    async def _try_again_and_again(self) -> None:
        """While prompts fail, and no other tells whose fault that is, send a known good one."""
        policy = RetryPolicy(max_attempts=1, max_delay_s=15.0)
        setback = 0
        while True:
            now = asyncio.get_running_loop().time()
            if self._breaker.is_open or self._breaker.trouble_s(now=now) > TRIAL_AFTER_S:
                setback += 1
                await asyncio.sleep(policy.delay_s(setback, chance=random.random()))
                await self._try()
            else:
                setback = 0
                with suppress(TimeoutError):
                    async with asyncio.timeout(ALIVE_INTERVAL_S):
                        await self._has_opened.wait()
                self._has_opened.clear()

    async def _ask_again_and_again(self) -> None:
        """A server that is told to end goes on taking prompts, and ends when it has none left."""
        while True:
            await asyncio.sleep(DRAIN_INTERVAL_S)
            if self.gate.num_in_flight or self.is_draining:
                is_draining = await self._client.is_draining()
                if is_draining is not None and is_draining != self.is_draining:
                    now = asyncio.get_running_loop().time()
                    self._draining_since = now if is_draining else None
                    self._set_gate()

    async def _try(self) -> None:
        loop = asyncio.get_running_loop()
        request = probe_request(self._run_id, probe_ids(vocab_size=self._target.limits.vocab_size))
        sent_at = loop.time()
        abandoned = self._collector.abandoned
        abandoned.add(request.rid)
        collected = self._collector.expect(request.rid, num_tokens=PROBE_TOKENS)
        try:
            async with asyncio.timeout(DEFAULT_TIMINGS.probe.timeout_s):
                reply: ReplyFacts | Collected = await self._client.generate(request)
                if isinstance(reply, Failure) and reply.is_copy:
                    reply = await collected  # the reply goes to the sender of the first copy
        except TimeoutError:
            await self._client.abort(request.rid)
            detail = f"no answer to a probe in {DEFAULT_TIMINGS.probe.timeout_s:.0f} s"
            self._breaker.unserved(now=loop.time())
            self._last_trouble = detail
            return
        finally:
            if collected.done():
                abandoned.discard(request.rid)
            self._collector.drop(request.rid, collected)
        failure = reply if isinstance(reply, Failure) else None
        if isinstance(reply, ReplyFacts):
            failure = check_reply(reply, num_tokens=PROBE_TOKENS)
        elif failure is not None and (failure.is_unsent or not failure.is_unanswered):
            abandoned.discard(request.rid)  # it will not be dumped
        self.note(failure, sent_at=sent_at)

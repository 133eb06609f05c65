"""Watches one start of one server: probes it while it is paused, and ends it when it is lost."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import suppress

from extractor.core.checks import ReplyFacts, check_reply
from extractor.core.errors import ExtractorError, ServerGone, ServerLost, SpaceError
from extractor.core.events import ReportLine
from extractor.core.failure import Failure, FailureKind
from extractor.core.humanize import amount
from extractor.core.timings import Timings
from extractor.dispatch.health import Ending, Health, HealthState
from extractor.dispatch.retry import RetryPolicy
from extractor.dumps.collector import Collected, Collector
from extractor.dumps.discovery import is_alive
from extractor.servers.client import Client
from extractor.servers.probe import PROBE_TOKENS, probe_ids, probe_request
from extractor.servers.target import Target
from extractor.system.files import free_bytes
from manifest.states import Reason

RESTART_ADVICE = "Restart it and run the same command again; nothing stored is sent twice."
LOG_ADVICE = "See its log; the same command goes on."

logger = logging.getLogger(__name__)


class Monitor:
    """Keeps a server's health up to date and reports its changes."""

    def __init__(
        self,
        *,
        client: Client,
        target: Target,
        health: Health,
        collector: Collector,
        run_id: str,
        timings: Timings,
        report: ReportLine,
        wake: Callable[[], None],
    ) -> None:
        """`wake`: called whenever the server's limit may have changed."""
        self._client = client
        self._target = target
        self._health = health
        self._collector = collector
        self._run_id = run_id
        self._timings = timings
        self._report = report
        self._wake = wake
        self._is_paused = asyncio.Event()
        self._found_gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def note(self, failure: Failure | None, *, sent_at: float, is_probe: bool = False) -> None:
        """Learn from how a request ended; `failure`: None if it was served. `sent_at`: in the event
        loop's time."""
        before = self._health.state
        self._health.note(failure, now=_now(), sent_at=sent_at, is_probe=is_probe)
        self._report_change(before)
        self._wake()

    def _report_change(self, before: HealthState) -> None:
        state, url = self._health.state, self._client.url
        if state is HealthState.PAUSED:
            self._is_paused.set()
        if state is before:
            return
        logger.info("health server=%s state=%s before=%s", url, state.value, before.value)
        match state:
            case HealthState.SERVING:
                event, level, message = "server_back", "info", f"{url} serves again"
            case HealthState.PAUSED:
                event, level = "server_silent", "warning"
                message = (
                    f"{url} is failing all requests (last: {self._health.last_trouble}); pausing "
                    "it and probing"
                )
            case HealthState.STOPPING:
                event, level = "server_stopping", "warning"
                message = f"{url} is shutting down; not sending new prompts"
        self._report(message, event=event, level=level, server=url)

    def is_same_server(self) -> bool:
        """Whether the server that was proven is still the one behind the address.

        To be asked before a prompt is sent, since another server may have taken the address. If one
        has, `run` ends as soon as it can.
        """
        if self._health.is_silent:
            try:
                self._require_alive()
            except ServerGone as error:
                if not self._found_gone.done():
                    self._found_gone.set_exception(error)
                    self._found_gone.exception()  # retrieved, in case nobody watches any more
                return False
        return True

    async def run(self) -> None:
        """Watch until cancelled. Raises ServerLost, SpaceError."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch(), name="server-alive")
            tasks.create_task(self._probe_while_paused(), name="server-trial")
            tasks.create_task(self._ask_whether_stopping(), name="server-drain")
            await self._found_gone

    async def _watch(self) -> None:
        while True:
            self._require_alive()
            self._look_for_space()
            if (ending := self._health.ending(now=_now())) is not None:
                raise self._error(ending)
            await asyncio.sleep(self._timings.health.alive_interval_s)

    def _look_for_space(self) -> None:
        full = self._health.full
        if full is not None:
            with suppress(FileNotFoundError):  # the collector misses it too, and ends the run
                if free_bytes(full.directory) >= full.need_bytes:
                    self._health.full = None

    def _require_alive(self) -> None:
        for rank in self._target.ranks:
            if not is_alive(rank.ready):
                how = "was stopped" if self._health.state is HealthState.STOPPING else "died"
                raise ServerGone(
                    f"the server at {self._client.url} {how}: its process "
                    f"{rank.ready.process.pid} is gone",
                    RESTART_ADVICE,
                )

    def _error(self, ending: Ending) -> ExtractorError:
        health, server = self._health, f"the server at {self._client.url}"
        trouble = f"{health.trouble_s(now=_now()):.0f} s (last: {health.last_trouble})"
        match ending:
            case Ending.GONE:
                return ServerGone(f"{server} has not answered for {trouble}", RESTART_ADVICE)
            case Ending.USELESS:
                return ServerLost(
                    f"{server} answers, but has served nothing for {trouble}", LOG_ADVICE
                )
            case Ending.NOT_STOPPED:
                return ServerLost(
                    f"{server} is shutting down, and has not ended in "
                    f"{health.stopping_s(now=_now()):.0f} s",
                    LOG_ADVICE,
                )
            case Ending.NO_SPACE:
                assert health.full is not None
                full = health.full
                return SpaceError(
                    f"{full.directory}: {amount(free_bytes(full.directory))} free, a dump takes "
                    f"{amount(full.need_bytes)}. Nothing is lost: free space (`extractor doctor` "
                    "lists leftovers) and run the same command again."
                )

    async def _probe_while_paused(self) -> None:
        """While requests fail, and no other is served to show whose fault that is, send a probe."""
        timings = self._timings.health
        policy = RetryPolicy(
            max_attempts=1,
            base_delay_s=self._timings.dispatch.retry_base_s,
            max_delay_s=timings.trial_pause_s,
        )
        setback = 0
        while True:
            if self._health.needs_trial(now=_now()):
                setback += 1
                await asyncio.sleep(policy.delay_s(setback, chance=random.random()))
                await self._probe()
            else:
                setback = 0
                with suppress(TimeoutError):
                    async with asyncio.timeout(timings.alive_interval_s):
                        await self._is_paused.wait()
                self._is_paused.clear()

    async def _ask_whether_stopping(self) -> None:
        """A server that is told to end still takes prompts, and ends when it has none left."""
        while True:
            await asyncio.sleep(self._timings.health.drain_interval_s)
            is_stopping = await self._client.is_draining()
            before = self._health.state
            if is_stopping is not None and is_stopping != (before is HealthState.STOPPING):
                self._health.note_stopping(is_stopping, now=_now())
                self._report_change(before)
                self._wake()

    async def _probe(self) -> None:
        request = probe_request(self._run_id, probe_ids(vocab_size=self._target.limits.vocab_size))
        sent_at = _now()
        abandoned = self._collector.abandoned
        abandoned.add(request.rid)
        collected = self._collector.expect(request.rid, num_tokens=PROBE_TOKENS)
        timeout_s = self._timings.probe.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                reply: ReplyFacts | Collected = await self._client.generate(request)
                if isinstance(reply, Failure) and reply.kind is FailureKind.COPY:
                    reply = await collected  # the reply goes to the sender of the first copy
        except TimeoutError:
            await self._client.abort(request.rid)
            reply = Failure(
                reason=Reason.SERVER_ERROR,
                detail=f"no answer to a probe in {timeout_s:.0f} s",
                kind=FailureKind.SILENT,
            )
        finally:
            if collected.done():
                abandoned.discard(request.rid)
            self._collector.drop(request.rid, collected)
        failure = reply if isinstance(reply, Failure) else None
        if isinstance(reply, ReplyFacts):
            failure = check_reply(reply, num_tokens=PROBE_TOKENS)
        elif failure is not None and not failure.kind.may_be_processed:
            abandoned.discard(request.rid)  # it will not be dumped
        self.note(failure, sent_at=sent_at, is_probe=True)


def _now() -> float:
    return asyncio.get_running_loop().time()

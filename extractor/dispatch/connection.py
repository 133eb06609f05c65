"""One start of one server: sends requests and ties their dumps to them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum

from extractor.core.checks import ReplyFacts, check_reply
from extractor.core.counters import Counters, Stage
from extractor.core.errors import ConfigMismatch, ServerError
from extractor.core.failure import Failure, FailureKind
from extractor.core.request import Request, dump_bytes
from extractor.core.rids import make_rid
from extractor.dispatch.monitor import Monitor
from extractor.dispatch.scheduler import Lane, Slot
from extractor.dispatch.suspects import InFlightPrompt
from extractor.dumps.collector import Collected, Collector, remove_unfinished
from extractor.dumps.discovery import is_alive
from extractor.servers.client import Client
from extractor.servers.target import Target
from extractor.system.files import free_bytes
from manifest.states import Reason
from prompts.types import Prompt

logger = logging.getLogger(__name__)


class RequestState(Enum):
    """Where a request is, from its sending to its dump."""

    SENT = "sent"  # the server has it, or may have it, and has not answered
    DUE = "due"  # answered, or an earlier copy of it is processed: its dump must arrive
    TAKEN = "taken"  # its dump is whole, and the caller owns the files
    FAILED = "failed"  # nobody waits for it any more


@dataclass(eq=False, kw_only=True)
class _InFlight:
    """One request."""

    request: Request
    attempts: int  # of its prompt, over all sessions
    dump: asyncio.Future[Collected]
    state: RequestState = RequestState.SENT
    patience: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))


@dataclass(frozen=True, kw_only=True)
class ConnectionSettings:
    """What all connections of a session share."""

    run_id: str
    session_id: str  # unlike that of any other process: it keeps rids from repeating
    counters: Counters
    dump_timeout_s: float  # from the answer to the last piece
    death_shows_s: float  # after a broken connection, until a dead server is found dead


@dataclass(kw_only=True)
class ServedCount:
    """Prompts that were answered, and whose dumps are whole."""

    prompts: int = 0
    tokens: int = 0


class Connection:
    """Requests to one start of one server, in flight and unanswered."""

    def __init__(
        self,
        settings: ConnectionSettings,
        *,
        client: Client,
        target: Target,
        collector: Collector,
        lane: Lane,
        monitor: Monitor,
    ) -> None:
        self.target = target
        self.collector = collector
        self.lane = lane
        self.monitor = monitor
        self.served = ServedCount()
        self.has_ended = asyncio.Event()
        self._settings = settings
        self._client = client
        self._in_flight: dict[str, _InFlight] = {}  # by rid
        #: By row: prompts whose last request reached the server and has no answer, although nobody
        #: may wait for it any more.
        self._unanswered: dict[int, InFlightPrompt] = {}

    async def run(self) -> None:
        """Watch the server and its dumps until cancelled.

        Raises what ended it, in an ExceptionGroup: ServerError when the server is lost, SpaceError.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.monitor.run(), name="server-monitor")
            tasks.create_task(self.collector.run(), name="collector")

    async def fetch(self, prompt: Prompt, attempt: int, slot: Slot) -> Collected:
        """Send `prompt` once; the pieces that tile it, or why this attempt gave none.

        `slot` is released when the server has answered. Whoever takes the pieces owns their files.
        """
        settings = self._settings
        rid = make_rid(
            run_id=settings.run_id,
            session_id=settings.session_id,
            ordinal=prompt.ordinal,
            attempt=attempt,
        )
        flight = self._in_flight[rid] = _InFlight(
            request=Request(rid=rid, prompt=prompt),
            attempts=attempt,
            dump=self.collector.expect(rid, num_tokens=prompt.num_tokens),
        )
        try:
            async with flight.patience:  # `end` breaks it off
                outcome = await self._exchange(flight, slot)
        except TimeoutError:
            outcome = Failure(
                reason=Reason.SERVER_ERROR,
                detail="its server was lost meanwhile",
                kind=FailureKind.BROKEN,
            )
        finally:
            slot.release()
            self._close(flight)
        return outcome

    async def _exchange(self, flight: _InFlight, slot: Slot) -> Collected:
        """The request's way from state to state."""
        failure = await self._send(flight, slot)
        if failure is not None:
            flight.state = RequestState.FAILED
            # A dump may have come nevertheless: it is removed before its bytes are given back.
            with suppress(ServerError):  # which ends `run`
                self.collector.poll()
            return failure
        outcome = await self._dump_of(flight)
        if isinstance(outcome, Failure):
            return self._unless_full(outcome, flight.request.prompt)
        flight.state = RequestState.TAKEN
        self.served.prompts += 1
        self.served.tokens += flight.request.prompt.num_tokens
        return outcome

    async def _send(self, flight: _InFlight, slot: Slot) -> Failure | None:
        """Send the request and wait for its answer; None once its dump is due."""
        request, prompt = flight.request, flight.request.prompt
        was_unanswered = prompt.ordinal in self._unanswered
        self._unanswered[prompt.ordinal] = InFlightPrompt(
            prompt=prompt, ordinal=prompt.ordinal, attempts=flight.attempts
        )
        self._settings.counters.sent += 1
        logger.debug(
            "sent rid=%s row=%d attempt=%d server=%s tokens=%d",
            request.rid, prompt.ordinal, flight.attempts, self._client.url, prompt.num_tokens,
        )  # fmt: skip
        sent_at = _now()
        reply: ReplyFacts | Failure | None = await self._client.generate(request)
        if isinstance(reply, Failure) and reply.kind is FailureKind.COPY:
            reply = await self._dump_of_copy(reply, flight)
        if not isinstance(reply, Failure) or (
            not reply.kind.may_be_processed
            and not (reply.kind is FailureKind.UNSENT and was_unanswered)
        ):
            self.forget(prompt.ordinal)
        if isinstance(reply, ReplyFacts):
            self._require_weight_version(reply)
            reply = check_reply(reply, num_tokens=prompt.num_tokens)
        if not isinstance(reply, Failure):
            self._settings.counters.stages[Stage.REQUEST].add(_now() - sent_at)
        self.monitor.note(reply, sent_at=sent_at)
        if prompt.ordinal in self._unanswered:
            await self._fate_shows()
        slot.release()
        if reply is None:
            flight.state = RequestState.DUE
            logger.debug("answered rid=%s row=%d", request.rid, prompt.ordinal)
        else:
            await self._give_up_request(request.rid, reply)
        return reply

    async def _fate_shows(self) -> None:
        """Wait until the server has ended or answers again, `death_shows_s` at least.

        Before a prompt is risked with another server, it must be known whether it killed this one;
        and beside a suspect, nothing else may be sent here meanwhile. A server that stays silent is
        probed, and given up after `gone_after_s`.
        """
        is_first = True
        while (is_first or self.lane.health.is_silent) and not self.has_ended.is_set():
            is_first = False
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.death_shows_s):
                    await self.has_ended.wait()

    async def _give_up_request(self, rid: str, failure: Failure) -> None:
        """The server may still process it, after a time-out of ours: ask it to stop."""
        if failure.kind.may_be_processed:
            self.collector.abandoned.add(rid)
        if not (failure.kind.is_lost or failure.kind.is_refusal):
            await self._client.abort(rid)

    async def _dump_of(self, flight: _InFlight) -> Collected:
        """Wait for the dump of an answered request."""
        answered_at = _now()
        timeout_s = self._settings.dump_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                outcome = await asyncio.shield(flight.dump)
        except TimeoutError:
            num_tokens = flight.request.prompt.num_tokens
            return Failure(
                reason=Reason.DUMP_MISSING,
                detail=f"answered, but {self.collector.rows_seen(flight.request.rid)} of "
                f"{num_tokens} rows arrived in {timeout_s:g} s",
            )
        self._settings.counters.stages[Stage.ARRIVAL].add(_now() - answered_at)
        return outcome

    async def _dump_of_copy(self, failure: Failure, flight: _InFlight) -> Failure | None:
        """Wait for the dump of a request whose first copy is being processed; None when it arrives.

        The reply goes to the sender of that copy; the dump is proof enough.
        """
        flight.state = RequestState.DUE
        timeout_s = self._settings.dump_timeout_s
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(flight.dump)
            return None
        return replace(
            failure,
            detail=f"{failure.detail}; no dump of the copy that is at work arrived in "
            f"{timeout_s:g} s",
        )

    def _close(self, flight: _InFlight) -> None:
        """Stop waiting for a request, whatever became of it."""
        rid = flight.request.rid
        del self._in_flight[rid]
        if flight.state is RequestState.TAKEN:
            return
        if flight.state is RequestState.SENT or (
            flight.state is RequestState.DUE and not flight.dump.done()
        ):
            self.collector.abandoned.add(rid)
        self.collector.drop(rid, flight.dump)

    def _unless_full(self, failure: Failure, prompt: Prompt) -> Failure:
        """The failure of a dump; not the prompt's fault if somebody else filled the dump root."""
        if failure.reason not in (Reason.DUMP_FAILED, Reason.DUMP_MISSING):
            return failure
        need = dump_bytes(prompt.num_tokens, self.target.ready.layout, self.target.limits)
        for rank in self.target.ranks:
            with suppress(FileNotFoundError):  # the collector misses it too, and ends the run
                if free_bytes(rank.path) < need:
                    self.lane.health.note_full(rank.path, need, now=_now())
                    return replace(failure, kind=FailureKind.FULL)
        return failure

    def _require_weight_version(self, reply: ReplyFacts) -> None:
        """Raise ConfigMismatch, which ends the run, if the engine's label of weights changed."""
        before = self.target.facts.weight_version
        if None not in (before, reply.weight_version) and reply.weight_version != before:
            raise ConfigMismatch(
                f"{self._client.url} changed its weight version during the run: {before!r} when it "
                f"began, now {reply.weight_version!r}. No row of the new weights was stored. "
                "Restart the server with the old weights and run the same command, or use another "
                "--out for the new ones."
            )

    def forget(self, ordinal: int) -> None:
        """The prompt is answered, or given up."""
        self._unanswered.pop(ordinal, None)

    def end(self) -> Sequence[InFlightPrompt]:
        """The server is lost: break off what is in flight. Returns the unanswered prompts."""
        with suppress(ServerError):
            self.collector.poll()  # what is whole by now need not be sent again
        unanswered, self._unanswered = list(self._unanswered.values()), {}
        now = _now()
        for flight in self._in_flight.values():
            if flight.state is RequestState.SENT or not flight.dump.done():
                flight.patience.reschedule(now)
        self.has_ended.set()
        return unanswered

    async def abandon(self) -> None:
        """Leave none of our requests with the server."""
        rids = {flight.request.rid for flight in self._in_flight.values()}
        self.collector.abandoned |= rids
        await asyncio.gather(*(self._client.abort(rid) for rid in self.collector.abandoned))

    def tidy(self) -> None:
        """Remove what the lost server left or still writes, except what was handed over."""
        with suppress(ServerError, OSError):  # somebody else removes the directory
            self.collector.poll()
            remove_unfinished([rank for rank in self.target.ranks if not is_alive(rank.ready)])

    async def close(self) -> None:
        """Leave nothing of ours with the server or under the dump root; nothing may be copied any
        more."""
        await self.abandon()
        # Dumps of a lost server are not waited for.
        await self.collector.clear(patience_s=0.0 if self.has_ended.is_set() else None)


def _now() -> float:
    return asyncio.get_running_loop().time()

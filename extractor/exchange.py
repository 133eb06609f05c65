"""One prompt, one request, one set of pieces: what passes between us and one start of a server."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

from extractor.client import Client
from extractor.collector import LATE_DUMPS_S, Collected, Collector, remove_unfinished
from extractor.concurrency import Limiter
from extractor.config import Layout, RunOptions
from extractor.errors import ConfigMismatch, ServerError
from extractor.files import free_bytes
from extractor.measurements import Counters, Stage
from extractor.plan import Request, dump_bytes, make_rid, rid_prefix
from extractor.preflight import Target
from extractor.progress import Say
from extractor.retry import Failure
from extractor.server_watch import ServerWatch
from extractor.tables import amount
from extractor.turns import Turn, Turns
from extractor.verify import ReplyFacts, check_reply
from extractor.writers import is_alive
from manifest.states import Reason
from prompts.types import Prompt

#: So long after a broken connection it is known whether the server died.
DEATH_SHOWS_S = 2.0
#: Between two looks whether a full dump root has room again.
FULL_PAUSE_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Unanswered:
    """A prompt that the server has, or may have had, and said nothing of."""

    prompt: Prompt
    attempts: int  # so far, over all sessions


class Exchange:
    """Sends requests to one start of one server and ties their dumps to them."""

    def __init__(
        self,
        *,
        options: RunOptions,
        client: Client,
        target: Target,
        collector: Collector | None,
        counters: Counters,
        run_id: str,
        layout: Layout,
        limiter: Limiter,
        turns: Turns,
        say: Say,
    ) -> None:
        """`collector`: of an earlier exchange with the same start of the server; None: there was
        none. `say`: tells a person what the run waits for."""
        self.target = target
        self.collector = collector or Collector(target.ranks, rid_prefix=rid_prefix(run_id))
        self.rids: set[str] = set()  # with the server now
        self.num_prompts = 0  # answered, their dumps whole
        self.num_tokens = 0  # of these
        self.has_ended = asyncio.Event()
        self._client = client
        self._counters = counters
        self._run_id = run_id
        # Attempts in flight at a crash are not recorded: this alone keeps rids from repeating.
        self._session_id = secrets.token_hex(6)
        self._dump_timeout_s = options.dump_timeout_s
        self._layout = layout
        #: By ordinal: whose last request reached the server and had no answer.
        self._unanswered: dict[int, Unanswered] = {}
        #: What may break a fetch off, and the dump that it waits for once it is answered.
        self._under_way: dict[asyncio.Timeout, asyncio.Future[Collected] | None] = {}
        self.watch = ServerWatch(
            client=client,
            target=target,
            run_id=run_id,
            limiter=limiter,
            turns=turns,
            collector=self.collector,
            say=say,
        )

    async def run(self) -> None:
        """Watch the server and its dumps until cancelled.

        Raises what ended it, in an ExceptionGroup: ServerError when the server is lost, SpaceError.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.watch.run(), name="server-watch")
            tasks.create_task(self.collector.run(), name="collector")

    def holds(self, ordinal: int) -> bool:
        """Whether the server may still be at work on the prompt, which it has not answered."""
        return ordinal in self._unanswered

    async def fetch(self, prompt: Prompt, attempt: int, turn: Turn) -> Collected:
        """Send `prompt` once; the pieces that tile it, or why this attempt gave none.

        `turn` is released when the server has answered. Whoever takes the pieces owns their files.
        """
        try:
            async with self._until_ended() as patience:
                return await self._fetch(prompt, attempt, turn, patience)
        except TimeoutError:
            return Failure(
                reason=Reason.SERVER_ERROR,
                detail="its server was lost meanwhile",
                is_transport=True,
                is_unanswered=True,
            )
        finally:
            turn.release()

    @asynccontextmanager
    async def _until_ended(self) -> AsyncIterator[asyncio.Timeout]:
        """A block that `end` breaks off with TimeoutError."""
        async with asyncio.timeout(None) as patience:
            self._under_way[patience] = None
            try:
                yield patience
            finally:
                del self._under_way[patience]

    async def _fetch(
        self, prompt: Prompt, attempt: int, turn: Turn, patience: asyncio.Timeout
    ) -> Collected:
        rid = make_rid(
            run_id=self._run_id,
            session_id=self._session_id,
            ordinal=prompt.ordinal,
            attempt=attempt,
        )
        collected = self.collector.expect(rid, num_tokens=prompt.num_tokens)
        is_due = is_taken = False
        try:
            request = Request(rid=rid, prompt=prompt)
            reply_failure = await self._send(request, attempt, turn, patience, collected)
            if reply_failure is not None:
                # A dump may have come nevertheless: it goes before its room is given back.
                with suppress(ServerError):  # which ends `run`
                    self.collector.poll()
                return reply_failure
            is_due = True
            self._under_way[patience] = collected
            answered_at = asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(self._dump_timeout_s):
                    outcome = await asyncio.shield(collected)
            except TimeoutError:
                missing = Failure(
                    reason=Reason.DUMP_MISSING,
                    detail=f"answered, but {self.collector.rows_seen(rid)} of "
                    f"{prompt.num_tokens} rows arrived in {self._dump_timeout_s:g} s",
                )
                return self._unless_full(missing, prompt)
            self._counters.stages[Stage.ARRIVAL].add(
                asyncio.get_running_loop().time() - answered_at
            )
            is_taken = True
        finally:
            if not is_taken:
                if is_due and not collected.done():
                    self.collector.abandoned.add(rid)
                self.collector.drop(rid, collected)
        if isinstance(outcome, Failure):
            return self._unless_full(outcome, prompt)
        self.watch.note_space(None)
        self.num_prompts += 1
        self.num_tokens += prompt.num_tokens
        return outcome

    def _unless_full(self, failure: Failure, prompt: Prompt) -> Failure:
        """The failure of a dump; no fault of the prompt where its dump had no room."""
        if failure.reason not in (Reason.DUMP_FAILED, Reason.DUMP_MISSING):
            return failure
        return replace(failure, is_busy=True) if self._is_full(prompt) else failure

    def _is_full(self, prompt: Prompt) -> bool:
        """Whether somebody else took the room that the budget has for this prompt's dump."""
        need = dump_bytes(prompt.num_tokens, self._layout, self.target.limits)
        for rank in self.target.ranks:
            try:
                free = free_bytes(rank.directory)
            except FileNotFoundError:
                continue  # the collector misses it too, and ends the run
            if free < need:
                self.watch.note_space(
                    f"{rank.directory}: {amount(free)} free, a dump takes {amount(need)}."
                )
                return True
        return False

    @staticmethod
    def _is_settled(reply: ReplyFacts | Failure | None, *, was_unanswered: bool) -> bool:
        """Whether the server can have nothing of this prompt under way."""
        if not isinstance(reply, Failure) or not reply.is_unanswered:
            return True
        return reply.is_unsent and not was_unanswered

    def forget(self, ordinal: int) -> None:
        """The prompt is given up."""
        self._unanswered.pop(ordinal, None)

    async def _send(
        self,
        request: Request,
        attempt: int,
        turn: Turn,
        patience: asyncio.Timeout,
        collected: asyncio.Future[Collected],
    ) -> Failure | None:
        """One request; None when the server prefilled all of it."""
        ordinal = request.prompt.ordinal
        while self._is_full(request.prompt):  # noqa: ASYNC110 - nobody tells of freed space
            await asyncio.sleep(FULL_PAUSE_S)
        self._counters.sent += 1
        self.rids.add(request.rid)
        was_unanswered = ordinal in self._unanswered
        self._unanswered[ordinal] = Unanswered(prompt=request.prompt, attempts=attempt)
        sent_at = asyncio.get_running_loop().time()
        reply: ReplyFacts | Failure | None = await self._client.generate(request)
        if isinstance(reply, Failure) and reply.is_copy:
            self._under_way[patience] = collected
            reply = await self._dump_of_copy(reply, collected)
        self.rids.discard(request.rid)
        if self._is_settled(reply, was_unanswered=was_unanswered):
            self.forget(ordinal)
        if not isinstance(reply, Failure):
            self._counters.stages[Stage.REQUEST].add(asyncio.get_running_loop().time() - sent_at)
        if isinstance(reply, ReplyFacts):
            self._require_weight_version(reply)
            reply = check_reply(reply, num_tokens=request.prompt.num_tokens)
        self.watch.note(reply, sent_at=sent_at, num_tokens=request.prompt.num_tokens)
        if turn.is_alone and ordinal in self._unanswered:
            # If it killed the server, nothing else may be under way when that is found out.
            with suppress(TimeoutError):
                async with asyncio.timeout(DEATH_SHOWS_S):
                    await self.has_ended.wait()
        turn.release()
        if reply is None:
            return None
        if reply.is_unanswered and not reply.is_unsent:
            self.collector.abandoned.add(request.rid)
        if not reply.is_transport and not reply.is_busy:
            # It may still be at work on it, after a time-out of ours.
            await self._client.abort(request.rid)
        return reply

    def _require_weight_version(self, reply: ReplyFacts) -> None:
        """Raise ConfigMismatch, which ends the run, if the weights changed since it began.

        The dumps name their weights as well; this checks the engine's own label.
        """
        before = self.target.facts.weight_version
        if None not in (before, reply.weight_version) and reply.weight_version != before:
            raise ConfigMismatch(
                f"{self._client.url} changed its weight version during the run: {before!r} when it "
                f"began, now {reply.weight_version!r}. No row of the new weights was stored. "
                "Restart the server with the old weights and run the same command, or use another "
                "--out for the new ones."
            )

    async def _dump_of_copy(
        self, failure: Failure, collected: asyncio.Future[Collected]
    ) -> Failure | None:
        """Wait for the dump of a request whose first copy is being processed; None when it arrives.

        The reply goes to the sender of that copy. The dump is proof enough: its rows tile the
        prompt and carry its tokens.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self._dump_timeout_s):
                await asyncio.shield(collected)
            return None
        return replace(
            failure,
            detail=f"{failure.detail}; no dump of the copy that is at work arrived in "
            f"{self._dump_timeout_s:g} s",
        )

    def end(self) -> Sequence[Unanswered]:
        """The server is lost: break off what is under way. The prompts that it had not answered."""
        with suppress(ServerError):
            self.collector.poll()  # what is whole by now need not be asked for again
        unanswered, self._unanswered = list(self._unanswered.values()), {}
        now = asyncio.get_running_loop().time()
        for patience, dump in self._under_way.items():
            if dump is None or not dump.done():
                patience.reschedule(now)
        self.has_ended.set()
        return unanswered

    async def abandon(self) -> None:
        """Leave nothing of ours with the server."""
        await asyncio.gather(*(self._client.abort(rid) for rid in self.rids))
        self.collector.abandoned |= self.rids
        self.rids.clear()

    def tidy(self) -> None:
        """Remove what the lost server left or still writes, but for what was handed over."""
        with suppress(ServerError, OSError):  # somebody else removes the directory
            self.collector.poll()
            remove_unfinished([rank for rank in self.target.ranks if not is_alive(rank.ready)])

    async def close(self) -> None:
        """Leave nothing of ours with the server or under the dump root, whatever ended the run.

        To be called when nothing is copied any more.
        """
        await self.abandon()
        # What is lost is not waited for.
        await self.collector.clear(patience_s=0.0 if self.has_ended.is_set() else LATE_DUMPS_S)

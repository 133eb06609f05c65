"""One prompt, one request, one set of pieces: what passes between us and the server."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from extractor.client import Client
from extractor.collector import Collected, Collector
from extractor.config import Layout, RunOptions
from extractor.errors import ServerError
from extractor.files import free_bytes
from extractor.plan import Request, dump_bytes, make_rid, rid_prefix
from extractor.preflight import Target
from extractor.progress import Counters
from extractor.retry import Failure, is_convicted
from extractor.server_watch import ServerWatch
from extractor.tables import amount
from extractor.verify import ReplyFacts, check_reply
from manifest.owner import StoreOwner
from manifest.records import Failed, Moved
from manifest.states import Event, Reason
from prompts.types import Prompt

#: At the end of a run, dumps of requests that were given up get so long to come and be removed.
LATE_DUMPS_S = 2.0
#: Between two looks whether a full dump root has room again.
FULL_PAUSE_S = 0.2


class Exchange:
    """Sends requests, at most `concurrency` at once, and ties their dumps to them."""

    def __init__(
        self,
        *,
        options: RunOptions,
        client: Client,
        target: Target,
        owner: StoreOwner,
        counters: Counters,
        run_id: str,
        layout: Layout,
        suspects: Mapping[int, int],
        say: Callable[[str], None],
    ) -> None:
        """`suspects`: prompts that a dying server had not answered -> how often. `say`: tells a
        person what the run waits for."""
        self.collector = Collector(target.ranks, rid_prefix=rid_prefix(run_id))
        self.rids: set[str] = set()  # with the server now
        self._client = client
        self._target = target
        self._owner = owner
        self._counters = counters
        self._run_id = run_id
        self._session_id = secrets.token_hex(3)
        self._dump_timeout_s = options.dump_timeout_s
        self._layout = layout
        self._suspects = suspects
        #: Prompts whose last request reached the server and had no answer -> number of attempts.
        self._unanswered: dict[int, int] = {}
        self.watch = ServerWatch(
            client=client,
            target=target,
            run_id=run_id,
            max_requests=options.concurrency,
            say=say,
        )

    async def fetch(self, prompt: Prompt, attempt: int) -> Collected:
        """Send `prompt` once; the pieces that tile it, or why this attempt gave none.

        Whoever takes the pieces owns their files.
        """
        rid = make_rid(
            run_id=self._run_id,
            session_id=self._session_id,
            ordinal=prompt.ordinal,
            attempt=attempt,
        )
        collected = self.collector.expect(rid, num_tokens=prompt.num_tokens)
        is_taken = False
        try:
            reply_failure = await self._send(Request(rid=rid, prompt=prompt), attempt)
            if reply_failure is not None:
                # A dump may have come nevertheless: it goes before its room is given back.
                self.collector.poll()
                return reply_failure
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
            is_taken = True
        finally:
            if not is_taken:
                self.collector.drop(rid, collected)
        if isinstance(outcome, Failure):
            return self._unless_full(outcome, prompt)
        self.watch.note_space(None)
        return outcome

    def _unless_full(self, failure: Failure, prompt: Prompt) -> Failure:
        """The failure of a dump; no fault of the prompt where its dump had no room."""
        if failure.reason not in (Reason.DUMP_FAILED, Reason.DUMP_MISSING):
            return failure
        return replace(failure, is_busy=True) if self._is_full(prompt) else failure

    def _is_full(self, prompt: Prompt) -> bool:
        """Whether somebody else took the room that the budget has for this prompt's dump."""
        need = dump_bytes(prompt.num_tokens, self._layout, self._target.limits)
        for rank in self._target.ranks:
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
    def _is_settled(reply: ReplyFacts | Failure, *, was_unanswered: bool) -> bool:
        """Whether the server can have nothing of this prompt under way."""
        if not isinstance(reply, Failure) or not reply.is_unanswered:
            return True
        return reply.is_unsent and not was_unanswered

    def forget(self, ordinal: int) -> None:
        """The prompt is given up."""
        self._unanswered.pop(ordinal, None)

    async def _send(self, request: Request, attempt: int) -> Failure | None:
        """One request within the concurrency limit; None when the server prefilled all of it."""
        ordinal = request.prompt.ordinal
        while self._is_full(request.prompt):  # noqa: ASYNC110 - nobody tells of freed space
            await asyncio.sleep(FULL_PAUSE_S)
        async with self.watch.turn():
            self._owner.post(Moved(ordinal=ordinal, event=Event.SEND, attempts=attempt))
            self._counters.sent += 1
            self.rids.add(request.rid)
            was_unanswered = ordinal in self._unanswered
            self._unanswered[ordinal] = attempt
            sent_at = asyncio.get_running_loop().time()
            reply = await self._client.generate(request)
            self.rids.discard(request.rid)
            if self._is_settled(reply, was_unanswered=was_unanswered):
                self.forget(ordinal)
            if not isinstance(reply, Failure):
                reply = check_reply(reply, num_tokens=request.prompt.num_tokens) or reply
            self.watch.note(reply, sent_at=sent_at)
        if not isinstance(reply, Failure):
            return None
        if reply.is_unanswered and not reply.is_unsent:
            self.collector.abandoned.add(request.rid)
        if not reply.is_transport and not reply.is_busy:
            # It may still be at work on it, after a time-out of ours.
            await self._client.abort(request.rid)
        return reply

    async def close(self) -> list[int]:
        """Leave nothing of ours with the server or under the dump root, whatever ended the run;
        the prompts that are set aside because they killed the server."""
        convicted = self._settle_unanswered() if self.watch.is_lost else []
        await asyncio.gather(*(self._client.abort(rid) for rid in self.rids))
        self.collector.abandoned |= self.rids
        loop = asyncio.get_running_loop()
        until = loop.time() + (0.0 if self.watch.is_lost else LATE_DUMPS_S)
        # Everything that is still there, or comes, is nobody's any more.
        with suppress(ServerError):
            self.collector.sweep()
            while self.collector.abandoned and loop.time() < until:
                await asyncio.sleep(0.02)
                self.collector.poll()
        return convicted

    def _settle_unanswered(self) -> list[int]:
        """The server died: what it had not answered is suspect, or convicted."""
        convicted = []
        for ordinal, attempts in self._unanswered.items():
            num_deaths = self._suspects.get(ordinal, 0)
            if is_convicted(num_deaths=num_deaths, num_unanswered=len(self._unanswered)):
                convicted.append(ordinal)
                self._owner.post(
                    Failed(
                        ordinal=ordinal,
                        reason=Reason.KILLS_SERVER,
                        detail=f"the server died {num_deaths + 1} times with it, the last time "
                        "with nothing else to do",
                        attempts=attempts,
                    )
                )
            else:
                self._owner.post(Moved(ordinal=ordinal, event=Event.LOSE, attempts=attempts))
        return convicted

"""One prompt, one request, one set of pieces: what passes between us and the server."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress

from extractor.client import Client
from extractor.collector import Collected, Collector
from extractor.config import RunOptions
from extractor.errors import ServerError, ServerLost
from extractor.plan import Request, make_rid, rid_prefix
from extractor.preflight import Target
from extractor.progress import Counters
from extractor.retry import Failure
from extractor.verify import check_reply
from extractor.writers import is_alive
from manifest.owner import StoreOwner
from manifest.records import Moved
from manifest.states import Event, Reason
from prompts.types import Prompt

#: A server that answers nothing for this long is taken for dead although its process lives.
SERVER_SILENCE_S = 30.0
ALIVE_INTERVAL_S = 0.5
RESTART_ADVICE = "Restart it and run the same command again; nothing stored is sent twice."


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
    ) -> None:
        self.collector = Collector(target.ranks, rid_prefix=rid_prefix(run_id))
        self.rids: set[str] = set()  # with the server now
        self._client = client
        self._target = target
        self._owner = owner
        self._counters = counters
        self._run_id = run_id
        self._session_id = secrets.token_hex(3)
        self._dump_timeout_s = options.dump_timeout_s
        self._requests = asyncio.Semaphore(options.concurrency)
        self._last_answer_s = asyncio.get_running_loop().time()

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
                return Failure(
                    reason=Reason.DUMP_MISSING,
                    detail=f"answered, but {self.collector.rows_seen(rid)} of "
                    f"{prompt.num_tokens} rows arrived in {self._dump_timeout_s:g} s",
                )
            is_taken = True
        finally:
            if not is_taken:
                self.collector.drop(rid, collected)
        return outcome

    async def _send(self, request: Request, attempt: int) -> Failure | None:
        """One request within the concurrency limit; None when the server prefilled all of it."""
        async with self._requests:
            self._owner.post(
                Moved(ordinal=request.prompt.ordinal, event=Event.SEND, attempts=attempt)
            )
            self._counters.sent += 1
            self.rids.add(request.rid)
            reply = await self._client.generate(request)
            self.rids.discard(request.rid)
        if isinstance(reply, Failure):
            if not reply.is_transport and not reply.is_busy:
                # It may still be at work on it, after a time-out of ours.
                await self._client.abort(request.rid)
            return reply
        self._last_answer_s = asyncio.get_running_loop().time()
        return check_reply(reply, num_tokens=request.prompt.num_tokens)

    async def check_silence(self, failure: Failure) -> None:
        """After a broken connection: raise ServerLost when the server is gone, not just busy."""
        silence_s = asyncio.get_running_loop().time() - self._last_answer_s
        if silence_s > SERVER_SILENCE_S and not await self._client.is_answering():
            raise ServerLost(
                f"the server at {self._client.url} has not answered for {silence_s:.0f} s "
                f"({failure.detail}). {RESTART_ADVICE}"
            )

    async def watch_server(self) -> None:
        """Raise ServerLost when a writer's process ends."""
        while True:
            for rank in self._target.ranks:
                if not is_alive(rank.ready):
                    raise ServerLost(
                        f"the server at {self._client.url} died: its process {rank.ready.pid} "
                        f"is gone. {RESTART_ADVICE}"
                    )
            await asyncio.sleep(ALIVE_INTERVAL_S)

    async def close(self) -> None:
        """Leave nothing of ours with the server or under the dump root, whatever ended the run."""
        await asyncio.gather(*(self._client.abort(rid) for rid in self.rids))
        # Everything that is still there, or comes, is nobody's any more.
        with suppress(ServerError):
            for _ in range(10 if self.rids else 1):
                self.collector.sweep()
                await asyncio.sleep(0.05 if self.rids else 0)

"""Proves with one prompt that the plugin is active in the server behind an address."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from extractor.core.checks import ReplyFacts, check_reply
from extractor.core.errors import BadDumpDir, ExtractorError, PluginError, ServerLost
from extractor.core.failure import Failure, FailureKind
from extractor.core.request import Request
from extractor.core.rids import PROBE_SESSION, make_rid
from extractor.core.timings import DEFAULT_TIMINGS, ProbeTimings, Timings
from extractor.dumps.collector import Collector
from extractor.dumps.dump_piece import SampleFault, check_tokens, opened, read_tensor
from extractor.dumps.dump_reader import DumpPiece
from extractor.servers.canary import canary_ids as canary_new_ids
from extractor.servers.canary import encode_canary
from extractor.servers.client import Client
from extractor.servers.target import Target
from prompts.types import Prompt, RowOrigin

PROBE_TOKENS = 5


async def require_probe(
    client: Client,
    target: Target,
    *,
    run_id: str,
    canary_ids: Sequence[int] | None = None,
    timings: Timings = DEFAULT_TIMINGS,
) -> bytes:
    """Send the canary, check that its complete dump arrives, and return its encoded states.

    `canary_ids`: the tokens to send; None: those of a new canary. Raises PluginError, ServerLost,
    and BadDumpDir if the dump directory seems to be another server's.
    """
    limits = target.limits
    if canary_ids is None:
        ids = canary_new_ids(vocab_size=limits.vocab_size, max_tokens=limits.max_prompt_tokens)
    else:
        ids = np.array(canary_ids, dtype=np.int32)
    request = probe_request(run_id, ids)
    # Of the probe alone: what earlier sessions left is not the probe's to remove.
    collector = Collector(
        target.ranks, rid_prefix=request.rid, is_skipping=True, timings=timings.collect
    )
    try:
        probe = _Probe(
            client=client,
            target=target,
            collector=collector,
            request=request,
            timings=timings.probe,
        )
        return _encoded(request.prompt, await probe.pieces())
    finally:
        if collector.abandoned:
            await client.abort(request.rid)
        await collector.clear()


def probe_ids(*, vocab_size: int) -> npt.NDArray[np.int32]:
    """A few token ids that every model accepts."""
    return np.arange(1, PROBE_TOKENS + 1, dtype=np.int32) % vocab_size


def probe_request(run_id: str, input_ids: npt.NDArray[np.int32]) -> Request:
    """A request that belongs to no row, so that its dump never becomes a sample."""
    prompt = Prompt(
        ordinal=0,
        origin=RowOrigin(source="probe", line=0),
        label=None,
        input_ids=input_ids,
        loss_mask=np.zeros(len(input_ids), dtype=np.uint8),
    )
    session_id = PROBE_SESSION + secrets.token_hex(4)
    rid = make_rid(run_id=run_id, session_id=session_id, ordinal=0, attempt=1)
    return Request(rid=rid, prompt=prompt)


@dataclass(kw_only=True)
class _Probe:
    """One probe prompt under way."""

    client: Client
    target: Target
    collector: Collector
    request: Request
    timings: ProbeTimings
    refusal: str | None = None  # the last one, while the server refuses it
    reaction: str | None = None  # of the server, once it has the prompt

    async def pieces(self) -> Sequence[DumpPiece]:
        """Send it and wait for its whole dump."""
        rid, abandoned = self.request.rid, self.collector.abandoned
        collected = self.collector.expect(rid, num_tokens=self.request.prompt.num_tokens)
        collecting = asyncio.create_task(self.collector.run(), name="probe-collector")
        try:
            async with asyncio.timeout(self.timings.timeout_s):
                abandoned.add(rid)  # until its dump is there, or known not to come
                self._judge(await self._send())
                either: set[asyncio.Future[Any]] = {collected, collecting}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if collecting.done():
                    collecting.result()  # raises what ended it
        except TimeoutError:
            raise self._timed_out() from None
        finally:
            collecting.cancel()
        abandoned.discard(rid)
        outcome = collected.result()
        if isinstance(outcome, Failure):
            raise _bad_dump(outcome.detail)
        return outcome

    async def _send(self) -> ReplyFacts | Failure:
        """Send it until the server does not refuse it."""
        while True:
            reply = await self.client.generate(self.request)
            if not (isinstance(reply, Failure) and reply.kind.is_refusal):
                self.refusal = None
                return reply
            self.refusal = reply.detail
            await asyncio.sleep(self.timings.busy_pause_s)

    def _judge(self, reply: ReplyFacts | Failure) -> None:
        """Raise PluginError for a reply after which no dump comes."""
        if isinstance(reply, Failure) and reply.kind is FailureKind.COPY:
            # The reply goes to the sender of the first copy; its dump is proof enough.
            self.reaction = f"has a copy of the probe prompt at work ({reply.detail})"
            return
        self.reaction = "answered the probe prompt"
        failure = reply if isinstance(reply, Failure) else None
        if isinstance(reply, ReplyFacts):
            failure = check_reply(reply, num_tokens=self.request.prompt.num_tokens)
        elif not reply.kind.may_be_processed:
            self.collector.abandoned.discard(self.request.rid)
        if failure is not None:
            raise PluginError(f"the probe prompt failed: {failure.detail}")

    def _timed_out(self) -> ExtractorError:
        """The error for a probe whose dump did not arrive in time."""
        server = f"the server at {self.target.url}"
        seconds = f"{self.timings.timeout_s:.0f} s"
        if self.refusal is not None:
            return ServerLost(
                f"{server} refused the probe prompt for {seconds} (last: {self.refusal})",
                "Run the same command again when it has room.",
            )
        if self.reaction is None:
            return ServerLost(
                f"{server} did not answer the probe prompt in {seconds}",
                "See its log; the same command goes on.",
            )
        directory, port = self.target.ranks[0].path, self.target.ready.process.port
        what = f"{server} {self.reaction}, but no dump of it arrived under {directory} in {seconds}"
        if port == urlsplit(self.target.url).port:
            return PluginError(what, "Does the server run prefill in CUDA graphs? See its log.")
        # Taken for want of one of that port, as behind a tunnel or a container's port mapping.
        return BadDumpDir(
            f"{what}. That directory is of a server on port {port}: if it is another one, this one "
            "has no plugin, or dumps elsewhere. Name its --dump-dir; `extractor serve --model …` "
            "starts one that dumps."
        )


def _encoded(prompt: Prompt, pieces: Sequence[DumpPiece]) -> bytes:
    """The states of a probe, as the manifest keeps a canary. Raises PluginError."""
    dump = pieces[0].handle.dump
    tensors = {name: b"" for name in dump.tensors}
    try:
        for piece in pieces:
            with opened(piece) as source:
                check_tokens(source, prompt, piece)
                for name in tensors:
                    tensors[name] += read_tensor(source, piece, name)
    except SampleFault as fault:
        raise _bad_dump(str(fault)) from fault
    return encode_canary(dump.header, tensors)


def _bad_dump(problem: str) -> PluginError:
    return PluginError(f"the dump of the probe prompt cannot be used: {problem}")

"""Everything that is proven before the first prompt is sent."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from extractor.core.checks import check_reply
from extractor.core.errors import (
    BadDumpDir,
    PluginError,
    ServerLost,
)
from extractor.core.failure import Failure
from extractor.core.request import Request
from extractor.core.rids import PROBE_SESSION, make_rid
from extractor.dumps.collector import Collector
from extractor.dumps.dump_piece import SampleFault, check_tokens, tensor_bytes
from extractor.servers.canary import canary_ids as canary_new_ids
from extractor.servers.canary import encode_canary
from extractor.servers.client import Client
from extractor.servers.target import Target
from prompts.types import Prompt, RowOrigin

PROBE_TIMEOUT_S = 60.0
#: Before a probe that was refused is sent again.
BUSY_PAUSE_S = 1.0
PROBE_TOKENS = 5


async def require_probe(
    client: Client, target: Target, *, run_id: str, canary_ids: Sequence[int] | None = None
) -> bytes:
    """Send the canary, check that its complete dump arrives, and return its encoded states.

    Only this proves that the plugin is active in the server behind `client`. `canary_ids`: the
    tokens to send; None: those of a new canary. Raises PluginError, and BadDumpDir if the dump
    directory seems to be another server's.
    """
    request = probe_request(
        run_id,
        canary_new_ids(
            vocab_size=target.limits.vocab_size, max_tokens=target.limits.max_prompt_tokens
        )
        if canary_ids is None
        else np.array(canary_ids, dtype=np.int32),
    )
    # Of the probe alone: what earlier sessions left is not the probe's to remove.
    collector = Collector(target.ranks, rid_prefix=request.rid, is_skipping=True)
    try:
        return await _probe(client, target, collector, request)
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


async def _probe(client: Client, target: Target, collector: Collector, request: Request) -> bytes:
    num_tokens = request.prompt.num_tokens
    collected = collector.expect(request.rid, num_tokens=num_tokens)
    refused = ""
    said = None
    watching = asyncio.create_task(collector.run(), name="probe-collector")
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            collector.abandoned.add(request.rid)  # unless it comes to its end here
            reply = await client.generate(request)
            while isinstance(reply, Failure) and reply.is_busy:
                refused = reply.detail
                await asyncio.sleep(BUSY_PAUSE_S)
                reply = await client.generate(request)
            refused = ""
            said = "answered the probe prompt"
            if isinstance(reply, Failure) and reply.is_copy:
                # The reply goes to the sender of the first copy; its dump is proof enough.
                said = f"has a copy of the probe prompt at work ({reply.detail})"
            elif isinstance(reply, Failure):
                if not reply.is_unanswered:
                    collector.abandoned.discard(request.rid)
                raise PluginError(f"the probe prompt failed: {reply.detail}")
            elif (failure := check_reply(reply, num_tokens=num_tokens)) is not None:
                raise PluginError(f"the probe prompt failed: {failure.detail}")
            either: set[asyncio.Future[Any]] = {collected, watching}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()  # raises what ended it
        outcome = collected.result()
        collector.abandoned.discard(request.rid)
    except TimeoutError:
        if refused:
            raise ServerLost(
                f"the server at {client.url} refused the probe prompt for {PROBE_TIMEOUT_S:.0f} s "
                f"(last: {refused}). Run the same command again when it has room."
            ) from None
        if said is None:
            raise ServerLost(
                f"the server at {client.url} did not answer the probe prompt in "
                f"{PROBE_TIMEOUT_S:.0f} s. See its log; the same command goes on."
            ) from None
        raise _no_dump(target, said) from None
    finally:
        watching.cancel()
    if isinstance(outcome, Failure):
        raise PluginError(f"the probe prompt's dump is no good: {outcome.detail}")
    try:
        for piece in outcome:
            check_tokens(request.prompt, piece)
        return encode_canary(
            outcome[0].handle.dump.header,
            {
                name: b"".join(tensor_bytes(piece, name) for piece in outcome)
                for name in outcome[0].handle.dump.tensors
            },
        )
    except SampleFault as fault:
        raise PluginError(f"the probe prompt's dump is no good: {fault}") from fault


def _no_dump(target: Target, said: str) -> BadDumpDir | PluginError:
    """The error for a probe that the server has, as `said` tells, and that left no dump."""
    directory, port = target.ranks[0].directory, target.ready.port
    told = (
        f"the server at {target.url} {said}, but no dump of it arrived under {directory} in "
        f"{PROBE_TIMEOUT_S:.0f} s."
    )
    if port == urlsplit(target.url).port:
        return PluginError(f"{told} Does the server run prefill in CUDA graphs? See its log.")
    # Taken for want of one of that port, as behind a tunnel or a container's port mapping.
    return BadDumpDir(
        f"{told} That directory is of a server on port {port}: if it is another one, this one has "
        "no plugin, or dumps elsewhere. Name its --dump-dir; `extractor serve --model …` starts "
        "one that dumps."
    )

"""Everything that is proven before the first prompt is sent."""

from __future__ import annotations

import asyncio
import errno
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from extractor.canary import canary_ids as canary_new_ids
from extractor.canary import encode_canary
from extractor.client import Client, ServerFacts, wait_until_answering
from extractor.collect import Rank
from extractor.collector import Collector
from extractor.config import Layout, RunOptions
from extractor.copying import SampleFault, check_tokens, tensor_bytes
from extractor.engine import boundaries_of
from extractor.errors import (
    BadDumpDir,
    ConfigMismatch,
    PluginError,
    ServerLost,
    ServerUnreachable,
    SpaceError,
    UsageError,
    storage_error,
)
from extractor.files import dangling_link, file_system_type, free_bytes
from extractor.headroom import MEMORY_FILE_SYSTEMS, headroom
from extractor.plan import PROBE_SESSION, RID_PREFIX, Limits, Request, dump_bytes, make_rid
from extractor.retry import Failure
from extractor.served import was_updated
from extractor.tables import amount
from extractor.verify import check_reply
from extractor.writers import ranks_of, scan_writers
from prompts.types import Prompt
from server_patch.dump_format import READY_NAME, Ready

PROBE_TIMEOUT_S = 60.0
#: Before a probe that was refused is sent again.
BUSY_PAUSE_S = 1.0
PROBE_TOKENS = 5
NETWORK_FILE_SYSTEMS = (
    "nfs", "cifs", "smb", "fuse", "lustre", "ceph", "gpfs", "beegfs", "9p", "afs", "glusterfs",
    "virtiofs",
)  # fmt: skip
#: Free space below which a run is not begun.
LEAST_FREE_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Target:
    """A server that is fit to run against."""

    url: str
    facts: ServerFacts
    ranks: tuple[Rank, ...]
    limits: Limits

    @classmethod
    def of(cls, url: str, facts: ServerFacts, ranks: tuple[Rank, ...]) -> Target:
        """Raises PluginError where the server does not tell its limits."""
        return cls(url=url, facts=facts, ranks=ranks, limits=limits_of(facts, ranks[0].ready))

    @property
    def ready(self) -> Ready:
        return self.ranks[0].ready


async def require_server(client: Client, *, wait_s: float) -> ServerFacts:
    """Wait for the server and return its description of itself.

    Raises ServerUnreachable and BadAddress, each with the next step for the user.
    """
    if not await wait_until_answering([client], timeout_s=wait_s):
        raise unreachable([client])
    return await client.facts()


def unreachable(clients: Sequence[Client]) -> ServerUnreachable:
    """The error to raise when none of the servers answers, with the last reason of each."""
    reasons = " ".join(client.silence for client in clients)
    return ServerUnreachable(
        f"{reasons} Start one with `extractor serve --model …`, "
        "name another with --server, or give --model to let `extractor run` start it. "
        "(A server that is still loading: --server-wait SECONDS.)"
    )


def require_plugin(
    root: Path, *, url: str, facts: ServerFacts, others: Sequence[str] = ()
) -> tuple[Rank, ...]:
    """The live writers of that server; `others`: addresses of other servers of the run.

    Raises PluginError with what to do.
    """
    ranks = ranks_of(scan_writers(root), url=url, model_path=facts.model_path, others=others)
    ready = ranks[0].ready
    # A live update may name another path; provenance.py says that the weights are others.
    if ready.model.path != facts.model_path and not was_updated(ready):
        raise PluginError(
            f"{ranks[0].directory / READY_NAME} is of model {ready.model.path}, "
            f"the server at {url} serves {facts.model_path}: another server's dump directory?"
        )
    if not RID_PREFIX.startswith(ready.capture.rid_prefix):
        raise PluginError(
            f"the server at {url} dumps requests whose rid begins with "
            f"{ready.capture.rid_prefix!r} (SGLANG_HS_RID_PREFIX); ours begin with {RID_PREFIX!r}"
        )
    first = ready.to_document()
    for rank in ranks[1:]:
        announced = rank.ready.to_document()
        for name in (
            "boundaries", "hidden_size", "dtype", "last_kind", "rid_prefix", "weights",
        ):  # fmt: skip
            if announced[name] != first[name]:
                raise PluginError(
                    f"data-parallel ranks 0 and {rank.ready.rank} differ in {name}: "
                    f"{first[name]!r} and {announced[name]!r}"
                )
    return ranks


def require_wanted(options: RunOptions, ready: Ready) -> None:
    """Raise ConfigMismatch when the server captures something else than the user asked for."""
    differences = []
    if options.model is not None and not same_model(options.model, ready.model.path):
        differences.append(f"--model {options.model}: it serves {ready.model.path}")
    if options.layers is not None:
        boundaries = boundaries_of(options.layers, num_layers=ready.model.num_layers)
        captured = ready.capture.boundaries
        if boundaries != captured:
            differences.append(
                f"--layers {options.layers}: it captures boundaries {list(captured)}"
            )
    if options.last_kind is not None and options.last_kind != ready.capture.last_kind:
        differences.append(f"--last {options.last_kind}: it keeps {ready.capture.last_kind}")
    if differences:
        raise ConfigMismatch(
            f"the server on port {ready.process.port} is not what was asked for:\n  "
            + "\n  ".join(differences)
            + "\nStart another, name it with --server, or leave the option out."
        )


def same_model(asked: str, served: str) -> bool:
    """Whether two names are of one model: equal, or of one folder."""
    return asked == served or (
        Path(asked).exists() and Path(served).exists() and Path(asked).samefile(served)
    )


def limits_of(facts: ServerFacts, ready: Ready) -> Limits:
    """What the server takes. SGLang refuses prompts of `max_req_input_len` tokens and more."""
    bounds = []
    if facts.max_input_tokens is not None:
        bounds.append(facts.max_input_tokens - 1)
    if facts.context_length is not None:
        bounds.append(facts.context_length - 1)  # one token is generated
    if not bounds:
        raise PluginError("the server tells neither max_req_input_len nor context_length")
    longest = min(bounds)
    chunk = ready.engine.chunked_prefill_size
    return Limits(
        max_prompt_tokens=longest,
        vocab_size=ready.model.vocab_size,
        chunk_tokens=chunk if chunk > 0 else longest,
    )


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
        source="probe",
        line=0,
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
    directory, port = target.ranks[0].directory, target.ready.process.port
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


def shm_budget(ranks: Sequence[Rank], wanted: int | None, *, limits: Limits) -> int:
    """Bytes of dumps to allow at a time. Default: half of what there is room for now, under the
    dump root and within the memory limits that hold for the server.

    Raises UsageError for a budget that does not hold even one short prompt, SpaceError when there
    is no room for that much.
    """
    room = headroom(ranks)
    ready = ranks[0].ready
    free = room.free_bytes
    budget = free // 2 if wanted is None else wanted
    num_tokens = min(1024, limits.max_prompt_tokens)
    least = dump_bytes(num_tokens, Layout.of(ready), limits)
    hint = (
        "In a container: --shm-size or --ipc=host. Leftovers: `extractor doctor` lists them."
        if room.is_of_file_system
        else "Free memory or raise that limit."
    )
    if wanted is not None and wanted < least:
        raise UsageError(
            f"--shm-budget {amount(wanted)} does not hold one prompt of {num_tokens:,} "
            f"tokens, which takes {amount(least)}"
        )
    if budget > room.sure_bytes:
        raise SpaceError(f"--shm-budget is {amount(budget)}, {room.what} {amount(free)}. {hint}")
    if budget < least:
        raise SpaceError(
            f"{room.what} {amount(free)}; half of it does not hold one prompt of "
            f"{num_tokens:,} tokens ({amount(least)}). {hint}"
        )
    return budget


def require_dump_directory(ranks: Sequence[Rank]) -> None:
    """Check that this process may create and remove files beside the dumps.

    Raises UsageError, SpaceError.
    """
    for rank in ranks:
        # One name for all clients: what a killed one leaves is removed by the next.
        trial = rank.directory / ".tmp-client"
        try:
            trial.write_bytes(b"")
            trial.unlink(missing_ok=True)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM):
                raise storage_error(error, where=rank.directory) from error
            raise UsageError(
                f"{rank.directory}: this user cannot create and remove files there ({error}). "
                "Run as the server's user, or start the server with "
                "SGLANG_HS_FILE_MODE=660 and a common group."
            ) from error


def manifest_warning(out: Path) -> str | None:
    """What is wrong with keeping a manifest on the file system of `out`; None when nothing is."""
    kind = file_system_type(out)
    if kind in MEMORY_FILE_SYSTEMS:
        return (
            f"warning: {out} is on {kind}: data set and manifest are lost with this machine's "
            "next start. Name an --out on a disk."
        )
    if kind.startswith(NETWORK_FILE_SYSTEMS):
        return (
            f"warning: {out} is on {kind}: SQLite's locks and its write-ahead log are not reliable "
            "on a network file system. Let no other host open the manifest while this run goes on, "
            "or name an --out on a local disk and copy it."
        )
    return None


def require_directory(path: Path, *, option: str) -> None:
    """Raise UsageError unless `path` is a directory or can become one.

    Raises OSError if `path` cannot be inspected.
    """
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; name a directory with {option}")
    if (link := dangling_link(path)) is not None:
        raise UsageError(
            f"{link} is a link to {link.readlink()}, which does not exist. Make that directory "
            f"or name another {option}"
        )


def prepare_out(out: Path) -> None:
    """Make the output directory and see that it can be written. Raises UsageError, SpaceError."""
    try:
        require_directory(out, option="--out")
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(error, where=out) from error
    try:
        trial = out / ".writable"  # one name: what a killed run leaves is removed by the next
        trial.write_bytes(b"x")
        trial.unlink(missing_ok=True)
    except OSError as error:
        raise storage_error(error, where=out) from error
    if (free := free_bytes(out)) < LEAST_FREE_BYTES:
        raise SpaceError(
            f"{out}: only {amount(free)} free, a run begins with "
            f"{amount(LEAST_FREE_BYTES)} at least. Free space or name another --out."
        )

"""The servers of a run: each is checked against the options, and all against each other."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from extractor.core.errors import ConfigMismatch, PluginError, ServerUnreachable
from extractor.core.events import ReportLine
from extractor.core.locations import DumpRoot
from extractor.core.request import Limits
from extractor.core.rids import RID_PREFIX
from extractor.core.run_options import RunOptions, Servers
from extractor.dumps.discovery import ranks_of, scan_writers
from extractor.dumps.dump_reader import Rank
from extractor.servers import server_facts
from extractor.servers.client import Client, ServerFacts, wait_until_answering
from extractor.servers.server_facts import was_updated
from extractor.servers.sglang_flags import boundaries_of
from server_patch.dump_format import MODEL_KEYS, READY_NAME, Ready

#: Keys of READY.json that all servers of a run must share, besides the bound facts: everything that
#: decides what is captured, and the versions.
ALIKE = (*MODEL_KEYS, "boundaries", "last_kind", "engine_version", "plugin_version")
#: Keys of READY.json that all data-parallel ranks of a server must share.
ALIKE_RANKS = ("boundaries", "hidden_size", "dtype", "last_kind", "rid_prefix", "weights")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A server that is fit to run against."""

    url: str
    facts: ServerFacts
    ranks: tuple[Rank, ...]
    limits: Limits

    @classmethod
    def of(cls, url: str, facts: ServerFacts, ranks: tuple[Rank, ...]) -> Target:
        """Raises PluginError if the server does not report its limits."""
        return cls(url=url, facts=facts, ranks=ranks, limits=limits_of(facts, ranks[0].ready))

    @property
    def ready(self) -> Ready:
        return self.ranks[0].ready


async def require_targets(
    clients: Sequence[Client], options: RunOptions, *, report: ReportLine
) -> list[Target | None]:
    """The target of each server; None for one that does not answer, if another does.

    Waits up to `--server-wait` for the first answer. Raises ServerUnreachable if none answers,
    BadAddress, ConfigMismatch if two servers differ, and the errors of `require_target`.
    """
    await wait_until_answering(clients, timeout_s=options.patience.server_wait_s)
    found = await asyncio.gather(
        *(require_target(client, options) for client in clients), return_exceptions=True
    )
    for outcome in found:
        if isinstance(outcome, BaseException) and not isinstance(outcome, ServerUnreachable):
            raise outcome
    targets = [outcome if isinstance(outcome, Target) else None for outcome in found]
    answering = [target for target in targets if target is not None]
    if not answering:
        raise unreachable(clients)
    for one, other in itertools.combinations(answering, 2):
        check_compatible(one, other)
    for client, target in zip(clients, targets, strict=True):
        if target is None:
            report(
                f"warning: {client.silence} The run begins without it, and uses it when it answers",
                event="server_lost",
                level="warning",
                server=client.url,
            )
    return targets


async def require_target(client: Client, options: RunOptions) -> Target:
    """Check that the server captures what the options ask for.

    Raises ServerUnreachable, PluginError, ConfigMismatch, UsageError with what to do.
    """
    facts = await require_server(client, wait_s=0.0)
    ranks = require_plugin(
        options.servers.dumps,
        url=client.url,
        facts=facts,
        others=[url for url in options.servers.urls if url != client.url],
    )
    require_wanted(options.servers, ranks[0].ready)
    return Target.of(client.url, facts, ranks)


def check_compatible(one: Target, other: Target) -> None:
    """Raise ConfigMismatch unless prompts may go to either of two servers."""
    if one.ready.boot_id == other.ready.boot_id and one.url != other.url:
        raise ConfigMismatch(
            f"{one.url} and {other.url} are the same server (pid {one.ready.process.pid}): "
            "name it once."
        )
    differences = {
        name: values
        for name, values in _differences(ALIKE, one.ready, other.ready).items()
        if not (name == "model_path" and same_model(*values))
    } | {
        bound.name: (bound.before, bound.now)
        for bound in server_facts.differences(
            server_facts.facts_of(one.ready), server_facts.facts_of(other.ready)
        )
    }
    if differences:
        raise ConfigMismatch(
            f"the servers at {one.url} and {other.url} differ:\n"
            + "\n".join(f"  {name}: {a!r} and {b!r}" for name, (a, b) in differences.items())
            + "\nStart them alike, or leave one out."
        )


def require_no_stricter(limits: Limits, target: Target) -> None:
    """Raise ConfigMismatch if a server that joins late takes less than the run counts on."""
    stricter = Limits.strictest([limits, target.limits])
    if stricter != limits:
        raise ConfigMismatch(
            f"the server at {target.url} takes {target.limits.max_prompt_tokens} tokens in chunks "
            f"of {target.limits.chunk_tokens}, the run was begun for {limits.max_prompt_tokens} in "
            f"chunks of {limits.chunk_tokens}."
        )


async def require_server(client: Client, *, wait_s: float) -> ServerFacts:
    """Wait for the server; return its facts. Raises ServerUnreachable, BadAddress, PluginError."""
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
    root: DumpRoot, *, url: str, facts: ServerFacts, others: Sequence[str] = ()
) -> tuple[Rank, ...]:
    """The live writers of that server; `others`: addresses of other servers of the run.

    Raises PluginError with what to do.
    """
    ranks = ranks_of(scan_writers(root), url=url, model_path=facts.model_path, others=others)
    ready = ranks[0].ready
    # A live update may name another path; provenance.py says that the weights are others.
    if ready.model.path != facts.model_path and not was_updated(ready):
        raise PluginError(
            f"{ranks[0].path / READY_NAME} is of model {ready.model.path}, "
            f"the server at {url} serves {facts.model_path}: another server's dump directory?"
        )
    if not RID_PREFIX.startswith(ready.capture.rid_prefix):
        raise PluginError(
            f"the server at {url} dumps requests whose rid begins with "
            f"{ready.capture.rid_prefix!r} (SGLANG_HS_RID_PREFIX); ours begin with {RID_PREFIX!r}"
        )
    for rank in ranks[1:]:
        for name, (first, found) in _differences(ALIKE_RANKS, ready, rank.ready).items():
            raise PluginError(
                f"data-parallel ranks 0 and {rank.ready.rank} differ in {name}: "
                f"{first!r} and {found!r}"
            )
    return ranks


def require_wanted(wanted: Servers, ready: Ready) -> None:
    """Raise ConfigMismatch if the server captures something else than the user asked for."""
    differences = []
    if wanted.model is not None and not same_model(wanted.model, ready.model.path):
        differences.append(f"--model {wanted.model}: it serves {ready.model.path}")
    if wanted.layers is not None:
        boundaries = boundaries_of(wanted.layers, num_layers=ready.model.num_layers)
        captured = ready.capture.boundaries
        if boundaries != captured:
            differences.append(f"--layers {wanted.layers}: it captures boundaries {list(captured)}")
    if wanted.last_kind is not None and wanted.last_kind != ready.capture.last_kind:
        differences.append(f"--last {wanted.last_kind}: it keeps {ready.capture.last_kind}")
    if differences:
        raise ConfigMismatch(
            f"the server on port {ready.process.port} is not what was asked for:\n  "
            + "\n  ".join(differences)
            + "\nStart another, name it with --server, or leave the option out."
        )


def _differences(names: Sequence[str], one: Ready, other: Ready) -> dict[str, tuple[Any, Any]]:
    """The keys of READY.json in which two writers differ, each with both values."""
    first, second = one.to_document(), other.to_document()
    return {name: (first[name], second[name]) for name in names if first[name] != second[name]}


def same_model(asked: str, served: str) -> bool:
    """Whether two names are of one model: equal, or of one folder."""
    return asked == served or (
        Path(asked).exists() and Path(served).exists() and Path(asked).samefile(served)
    )


def limits_of(facts: ServerFacts, ready: Ready) -> Limits:
    """The limits of a server. SGLang refuses prompts of `max_req_input_len` tokens and more."""
    bounds = [
        bound
        for bound in (facts.max_input_tokens, facts.context_length)  # of which one is generated
        if bound is not None
    ]
    if not bounds:
        raise PluginError("the server reports neither max_req_input_len nor context_length")
    longest = min(bounds) - 1
    chunk = ready.engine.chunked_prefill_size
    return Limits(
        max_prompt_tokens=longest,
        vocab_size=ready.model.vocab_size,
        chunk_tokens=chunk if chunk > 0 else longest,
    )

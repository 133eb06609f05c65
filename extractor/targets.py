"""The servers of a run, each fit to run against and all alike."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from extractor import served
from extractor.client import Client, wait_until_answering
from extractor.config import RunOptions
from extractor.errors import ConfigMismatch, ServerUnreachable
from extractor.plan import Limits
from extractor.preflight import (
    Target,
    require_plugin,
    require_server,
    require_wanted,
    same_model,
    unreachable,
)
from extractor.progress import Say

#: Keys of READY.json that all servers of a run must share, besides the bound facts of `served`:
#: everything that decides what is captured, and the versions.
ALIKE = (
    "model_path", "vocab_size", "num_layers", "hidden_size", "dtype", "boundaries", "last_kind",
    "engine_version", "plugin_version",
)  # fmt: skip


async def require_targets(
    clients: Sequence[Client], options: RunOptions, *, note: Say
) -> list[Target | None]:
    """Each server's target; None for one that does not answer, while another does.

    Waits up to `--server-wait` for the first answer. Raises ServerUnreachable when none answers,
    BadAddress, what `require_target` raises, and ConfigMismatch when two servers differ.
    """
    await wait_until_answering(clients, timeout_s=options.server_wait_s)
    found = await asyncio.gather(
        *(require_target(client, options) for client in clients), return_exceptions=True
    )
    targets: list[Target | None] = []
    for outcome in found:
        if isinstance(outcome, ServerUnreachable):
            targets.append(None)
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            targets.append(outcome)
    answering = [target for target in targets if target is not None]
    if not answering:
        raise unreachable(clients)
    for one, other in itertools.combinations(answering, 2):
        require_alike(one, other)
    for client, target in zip(clients, targets, strict=True):
        if target is None:
            note(
                f"warning: {client.silence} The run begins without it, and uses it when it answers",
                event="server_lost",
                level="warning",
                server=client.url,
            )
    return targets


async def require_target(client: Client, options: RunOptions) -> Target:
    """The server at an address, as one that captures what was asked for.

    Raises ServerUnreachable, PluginError, ConfigMismatch, UsageError with what to do.
    """
    facts = await require_server(client, wait_s=0.0)
    ranks = require_plugin(
        options.dump_root,
        url=client.url,
        facts=facts,
        others=[url for url in options.server_urls if url != client.url],
    )
    require_wanted(options, ranks[0].ready)
    return Target.of(client.url, facts, ranks)


def require_alike(one: Target, other: Target) -> None:
    """Raise ConfigMismatch unless prompts may go to either of two servers."""
    if one.ready.boot_id == other.ready.boot_id and one.url != other.url:
        raise ConfigMismatch(
            f"{one.url} and {other.url} are the same server (pid {one.ready.process.pid}): "
            "name it once."
        )
    first, second = one.ready.to_document(), other.ready.to_document()
    differences = [
        f"  {name}: {first[name]!r} and {second[name]!r}"
        for name in ALIKE
        if first[name] != second[name]
        and not (name == "model_path" and same_model(one.ready.model.path, other.ready.model.path))
    ]
    differences += [
        f"  {difference.name}: {difference.before!r} and {difference.now!r}"
        for difference in served.differences(
            served.facts_of(one.ready), served.facts_of(other.ready)
        )
    ]
    if differences:
        raise ConfigMismatch(
            f"the servers at {one.url} and {other.url} differ:\n"
            + "\n".join(differences)
            + "\nStart them alike, or leave one out."
        )


def require_no_stricter(limits: Limits, target: Target) -> None:
    """Raise ConfigMismatch where a server that comes late takes less than the run counts on."""
    stricter = Limits.strictest([limits, target.limits])
    if stricter != limits:
        raise ConfigMismatch(
            f"the server at {target.url} takes {target.limits.max_prompt_tokens} tokens in chunks "
            f"of {target.limits.chunk_tokens}, the run was begun for {limits.max_prompt_tokens} in "
            f"chunks of {limits.chunk_tokens}."
        )

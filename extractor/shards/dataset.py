"""Makes `dataset.json`, the provenance of a data set. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from extractor.core.humanize import table
from extractor.core.identity import Identity
from extractor.core.locations import DATASET_NAME
from extractor.core.version import __version__
from extractor.shards.format import SHARD_FORMAT_VERSION
from manifest.records import ServerStart

#: Maximum lines of `sessions_table`.
MAX_LINES = 20


def dataset_document(identity: Identity, starts: Sequence[ServerStart]) -> bytes:
    """Provenance as JSON, with layer numbers in both conventions.

    `boundaries`: index b is the residual stream entering layer b (Hugging Face `hidden_states[b]`).
    `layer_outputs`: the same states as outputs of layers, b - 1 (SpecForge, TorchSpec and others).
    `sessions`: see `sessions_document`.
    """
    document: dict[str, Any] = {
        "format": "hidden-state-extractor",
        "format_version": SHARD_FORMAT_VERSION,
        "tool_version": starts[-1].facts.get("tool_version") if starts else __version__,
        "engine": "sglang",
        "engine_version": starts[-1].facts.get("engine_version") if starts else None,
        **identity.to_document(),
        "layer_outputs": [boundary - 1 for boundary in identity.boundaries],
        "sessions": sessions_document(starts),
    }
    return orjson.dumps(document, option=orjson.OPT_INDENT_2)


def sessions_document(starts: Sequence[ServerStart]) -> list[dict[str, Any]]:
    """The sessions of a data set, each with the server starts that it extracted from.

    `canary_error`: the error of the start's canary against the one before it (servers/canary.py);
    null if there was none. `accepted`: the facts that the user allowed to change here.
    """
    sessions: dict[int, list[dict[str, Any]]] = {}
    for start in starts:
        sessions.setdefault(start.session, []).append(
            {
                "number": start.number,
                "used_at": start.used_at,
                "url": start.url,
                "boot_id": start.boot_id,
                "canary_error": start.canary_error,
                "accepted": list(start.accepted),
                **start.facts,
            }
        )
    return [{"session": number, "servers": servers} for number, servers in sessions.items()]


def sessions_table(starts: Sequence[ServerStart]) -> str:
    """A table of the servers behind each session; equal consecutive starts share a line."""
    lines: list[tuple[list[int], str]] = []
    alike: object = None
    for start in starts:
        key = (start.url, start.facts, start.accepted)
        if key == alike:
            lines[-1][0].append(start.session)
        else:
            lines.append(([start.session], _served(start)))
        alike = key
    hidden = len(lines) - MAX_LINES
    rows = [(_sessions(numbers), text) for numbers, text in lines[-MAX_LINES:]]
    if hidden > 0:
        rows.insert(0, ("…", f"{hidden:,} more before these: see {DATASET_NAME}"))
    return table(rows)


def _served(start: ServerStart) -> str:
    facts = start.facts
    settings = facts.get("settings") or {}
    loaded, plus, update = str(facts.get("weights") or "unknown").partition("+")
    parts = [
        f"weights {loaded[:12]}{plus}{update}",
        f"KV cache {facts.get('kv_cache_dtype')}",
        f"SGLang {facts.get('engine_version')}",
        *(str(settings[name]) for name in ("attention_backend", "device") if name in settings),
        f"tp {facts.get('tp_size')}",
        start.url,
    ]
    if start.accepted:
        parts.append(f"changed on purpose: {', '.join(start.accepted)}")
    return ", ".join(parts)


def _sessions(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    return f"session {first}" if first == last else f"sessions {first} to {last}"

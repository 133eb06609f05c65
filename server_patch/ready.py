"""READY.json and FAILED.json: what a client may count on, or why it may not."""

from __future__ import annotations

import importlib.metadata
import json
import os
from datetime import UTC, datetime
from pathlib import Path

from server_patch.dump_format import (
    READY_NAME,
    CaptureInfo,
    EngineInfo,
    LastKind,
    ModelInfo,
    ProcessInfo,
    Ready,
    WeightsInfo,
    encode_ready,
)
from server_patch.durable_files import replace
from server_patch.sglang_api import Facts

_DISTRIBUTION = "hidden-state-extractor"


def make_ready(
    *,
    facts: Facts,
    boot_id: str,
    rank: int,
    architecture: str,
    config_digest: str,
    boundaries: tuple[int, ...],
    capture_method: str,
    last_kind: LastKind,
    rid_prefix: str,
    ring_bytes: int,
    num_writers: int,
) -> Ready:
    """The contract of this process, complete."""
    return Ready(
        boot_id=boot_id,
        rank=rank,
        process=ProcessInfo(
            pid=os.getpid(),
            start_ticks=own_start_ticks(),
            started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            host=facts.host,
            port=facts.port,
            namespace=os.readlink("/proc/self/ns/pid"),
        ),
        engine=EngineInfo(
            version=facts.engine_version,
            tp_size=facts.tp_size,
            dp_size=facts.dp_size,
            chunked_prefill_size=facts.chunked_prefill_size,
            radix_cache=facts.radix_cache,
            kv_cache_dtype=facts.kv_cache_dtype,
            settings=facts.settings,
        ),
        model=ModelInfo(
            path=facts.model_path,
            architecture=architecture,
            config_digest=config_digest,
            vocab_size=facts.vocab_size,
            num_layers=facts.num_layers,
            hidden_size=facts.hidden_size,
            dtype=facts.dtype,
            quantization=facts.quantization,
        ),
        weights=WeightsInfo(),
        capture=CaptureInfo(
            plugin_version=plugin_version(),
            boundaries=boundaries,
            last_kind=last_kind,
            method=capture_method,
            rid_prefix=rid_prefix,
            ring_bytes=ring_bytes,
            num_writers=num_writers,
        ),
    )


def tell_ready(directory: Path, ready: Ready, *, file_mode: int) -> None:
    """Write READY.json. Raises OSError."""
    replace(directory, READY_NAME, encode_ready(ready), mode=file_mode)


def encode_failed(reason: str) -> bytes:
    return json.dumps({"reason": reason, "pid": os.getpid()}).encode()


def own_start_ticks() -> int:
    """Field 22 of /proc/self/stat, in clock ticks since boot."""
    text = Path("/proc/self/stat").read_text()
    # The command name, in parentheses, may hold spaces and parentheses itself.
    fields_from_third = text[text.rindex(")") + 2 :].split()
    return int(fields_from_third[19])


def plugin_version() -> str:
    try:
        return importlib.metadata.version(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"  # run from a source folder

"""What a run is asked to do. Frozen values; every bound is checked where the value is made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from os.path import realpath
from pathlib import Path
from typing import Any

from extractor.core.address import DEFAULT_SERVER_URL, require_url
from extractor.core.bounds import (
    MAX_BYTES,
    MAX_CONCURRENCY,
    MAX_COUNT,
    MAX_MOVERS,
    MAX_SECONDS,
    MAX_TOKENIZER_WORKERS,
    require_within,
)
from extractor.core.errors import UsageError
from extractor.core.identity import reading_document
from extractor.core.locations import DEFAULT_DUMP_ROOT, DEFAULT_OUT, MANIFEST_NAME, SHARDS_DIRECTORY
from extractor.core.row_policy import DEFAULT_POLICY, Policy
from prompts.reading_options import DEFAULTS, ReadingOptions

DEFAULT_SHARD_BYTES = 4 << 30


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """One `extractor run`: where things are, how hard to push, what to make of which rows."""

    prompts: tuple[Path, ...]
    out: Path = DEFAULT_OUT
    server_urls: tuple[str, ...] = (DEFAULT_SERVER_URL,)
    dump_root: Path = DEFAULT_DUMP_ROOT
    tokenizer: str | None = None  # default: the server's
    concurrency: int | None = None  # requests in flight with each server; None: finds itself
    shm_budget_bytes: int | None = None  # default: half of what is free under dump_root
    shard_bytes: int = DEFAULT_SHARD_BYTES
    num_movers: int = 1  # threads that copy dumps to shards
    max_attempts: int = 4  # requests per prompt and session
    request_timeout_s: float = 600.0  # one request, from sending to the answer
    dump_timeout_s: float = 60.0  # from the answer to the last piece
    server_wait_s: float = 0.0  # how long a server may take to come up
    file_mode: int = 0o644  # of shards and manifest
    # What the server must serve, where the user said so; None: whatever it does.
    model: str | None = None
    layers: str | None = None  # eagle3, or boundary indices as in "3,31,59"
    last_kind: str | None = None
    retry_failed: bool = False  # rows that an earlier session gave up are tried again
    allow_model_change: bool = False  # continue with a server that computes other states
    # What the prompts are; part of the data set's identity.
    reading: ReadingOptions = DEFAULTS
    policy: Policy = DEFAULT_POLICY
    tokenizer_workers: int | None = None  # processes; None: as many as pay

    def __post_init__(self) -> None:
        if not self.prompts:
            raise UsageError("name at least one prompt file")
        if not self.server_urls:
            raise UsageError("name at least one --server")
        for url in self.server_urls:
            require_url(url)
        # As the clients write them, so that two spellings are one.
        urls = tuple(url.rstrip("/") for url in self.server_urls)
        object.__setattr__(self, "server_urls", urls)
        # Not `Path.resolve`, which raises for symlink loops; a later check reports those.
        if Path(realpath(self.out)).is_relative_to(realpath(self.dump_root)):
            raise UsageError(
                f"--out {self.out} lies in the dump directory {self.dump_root}, which is cleaned "
                "of what is no dump of a live server; name another"
            )
        if len({url.lower() for url in self.server_urls}) < len(self.server_urls):
            raise UsageError(f"a --server is named twice: {', '.join(self.server_urls)}")
        for name, option, least, most in (
            ("concurrency", "--concurrency", 1, MAX_CONCURRENCY),
            ("shard_bytes", "--shard-size", 1, MAX_BYTES),
            ("shm_budget_bytes", "--shm-budget", 1, MAX_BYTES),
            ("num_movers", "--movers", 1, MAX_MOVERS),
            ("max_attempts", "--max-attempts", 1, MAX_COUNT),
            ("request_timeout_s", "--request-timeout", 0.001, MAX_SECONDS),
            ("dump_timeout_s", "--dump-timeout", 0.001, MAX_SECONDS),
            ("server_wait_s", "--server-wait", 0, MAX_SECONDS),
            ("tokenizer_workers", "--tokenizer-workers", 0, MAX_TOKENIZER_WORKERS),
        ):
            require_within(option, getattr(self, name), least=least, most=most)

    def with_server(self, url: str) -> RunOptions:
        """The same run against another server."""
        return replace(self, server_urls=(url,))

    @property
    def reading_document(self) -> dict[str, Any]:
        """All that decides how rows become prompts, as the identity holds it."""
        return reading_document(self.reading, self.policy)

    @property
    def manifest_path(self) -> Path:
        return self.out / MANIFEST_NAME

    @property
    def shards_path(self) -> Path:
        return self.out / SHARDS_DIRECTORY

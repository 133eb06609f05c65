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
DEFAULT_FILE_MODE = 0o644


@dataclass(frozen=True, kw_only=True)
class Input:
    """The rows, and how they become prompts."""

    paths: tuple[Path, ...]
    reading: ReadingOptions = DEFAULTS  # part of the data set's identity
    policy: Policy = DEFAULT_POLICY  # part of it, too
    tokenizer: str | None = None  # default: the server's
    tokenizer_workers: int | None = None  # processes; None: chosen by the number of rows

    def __post_init__(self) -> None:
        if not self.paths:
            raise UsageError("name at least one prompt file")
        require_within(
            "--tokenizer-workers", self.tokenizer_workers, least=0, most=MAX_TOKENIZER_WORKERS
        )

    @property
    def document(self) -> dict[str, Any]:
        """The reading options and the row policy as the identity holds them."""
        return reading_document(self.reading, self.policy)


@dataclass(frozen=True, kw_only=True)
class Output:
    """The data set: where it is written, and how."""

    directory: Path = DEFAULT_OUT
    shard_bytes: int = DEFAULT_SHARD_BYTES
    file_mode: int = DEFAULT_FILE_MODE  # of the shards

    def __post_init__(self) -> None:
        require_within("--shard-size", self.shard_bytes, least=1, most=MAX_BYTES)

    @property
    def manifest_path(self) -> Path:
        return self.directory / MANIFEST_NAME

    @property
    def shards_path(self) -> Path:
        return self.directory / SHARDS_DIRECTORY


@dataclass(frozen=True, kw_only=True)
class Servers:
    """The servers to send prompts to, and the capture that they must have."""

    urls: tuple[str, ...] = (DEFAULT_SERVER_URL,)
    dump_root: Path = DEFAULT_DUMP_ROOT
    # None: any model, whatever the servers capture.
    model: str | None = None
    layers: str | None = None  # eagle3, or boundary indices as in "3,31,59"
    last_kind: str | None = None

    def __post_init__(self) -> None:
        if not self.urls:
            raise UsageError("name at least one --server")
        for url in self.urls:
            require_url(url)
        # As the clients write them, so that two spellings are one.
        object.__setattr__(self, "urls", tuple(url.rstrip("/") for url in self.urls))
        if len({url.lower() for url in self.urls}) < len(self.urls):
            raise UsageError(f"a --server is named twice: {', '.join(self.urls)}")


@dataclass(frozen=True, kw_only=True)
class Load:
    """How much is in progress at once."""

    concurrency: int | None = None  # requests in flight with each server; None: automatic
    shm_budget_bytes: int | None = None  # default: half of what is free under the dump root
    num_movers: int = 1  # threads that copy dumps to shards

    def __post_init__(self) -> None:
        require_within("--concurrency", self.concurrency, least=1, most=MAX_CONCURRENCY)
        require_within("--shm-budget", self.shm_budget_bytes, least=1, most=MAX_BYTES)
        require_within("--movers", self.num_movers, least=1, most=MAX_MOVERS)


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long and how often to try."""

    max_attempts: int = 4  # requests per prompt and session
    request_timeout_s: float = 600.0  # one request, from sending to the answer
    dump_timeout_s: float = 60.0  # from the answer to the last piece
    server_wait_s: float = 0.0  # for a server to come up, or to come back

    def __post_init__(self) -> None:
        require_within("--max-attempts", self.max_attempts, least=1, most=MAX_COUNT)
        for option, seconds, least in (
            ("--request-timeout", self.request_timeout_s, 0.001),
            ("--dump-timeout", self.dump_timeout_s, 0.001),
            ("--server-wait", self.server_wait_s, 0),
        ):
            require_within(option, seconds, least=least, most=MAX_SECONDS)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of one `extractor run`."""

    input: Input
    output: Output = Output()
    servers: Servers = Servers()
    load: Load = Load()
    patience: Patience = Patience()
    retry_failed: bool = False  # try rows again that an earlier session gave up
    allow_model_change: bool = False  # continue with a server that computes other states

    def __post_init__(self) -> None:
        out, dump_root = self.output.directory, self.servers.dump_root
        # Not `Path.resolve`, which raises for symlink loops; a later check reports those.
        if Path(realpath(out)).is_relative_to(realpath(dump_root)):
            raise UsageError(
                f"--out {out} is inside the dump directory {dump_root}, which is cleaned "
                "automatically; name another"
            )

    def with_server(self, url: str) -> RunOptions:
        """The same run against another server."""
        return replace(self, servers=replace(self.servers, urls=(url,)))

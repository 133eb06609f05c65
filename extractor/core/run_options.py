"""The options of a run. Frozen values, whose bounds are checked when they are made."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from os.path import realpath
from pathlib import Path
from typing import Annotated, Any

from extractor.core.address import DEFAULT_SERVER_URL, require_url
from extractor.core.errors import UsageError
from extractor.core.identity import reading_document
from extractor.core.locations import (
    DEFAULT_DUMP_ROOT,
    DEFAULT_OUT,
    MANIFEST_NAME,
    SHARDS_DIRECTORY,
    DumpRoot,
)
from extractor.core.option import (
    MAX_BYTES,
    MAX_CONCURRENCY,
    MAX_COUNT,
    MAX_MOVERS,
    MAX_SECONDS,
    MAX_TOKENIZER_WORKERS,
    Option,
    check_options,
)
from extractor.core.row_policy import DEFAULT_POLICY, Policy
from prompts.reading_options import DEFAULTS, ReadingOptions
from server_patch.settings import SettingsError, require_file_mode

DEFAULT_SHARD_BYTES = 4 << 30


def default_movers() -> int:
    """A quarter of the cores, 2 to 8."""
    return min(8, max(2, (os.cpu_count() or 1) // 4))


@dataclass(frozen=True, kw_only=True)
class Input:
    """The rows, and how they become prompts."""

    paths: tuple[Path, ...]
    reading: ReadingOptions = DEFAULTS  # part of the data set's identity
    policy: Policy = DEFAULT_POLICY  # part of it, too
    tokenizer: Annotated[
        str | None,
        Option(
            "--tokenizer",
            "Tokenizer to render with, or none for rows of ids only.  [default: the server's]",
            metavar="PATH",
        ),
    ] = None
    tokenizer_workers: Annotated[
        int | None,
        Option(
            "--tokenizer-workers",
            "Processes that render and tokenise.  [default: a quarter of the cores, 1 to 8, for "
            "5,000 rows and more; else 1]",
            least=1,
            most=MAX_TOKENIZER_WORKERS,
        ),
    ] = None

    def __post_init__(self) -> None:
        if not self.paths:
            raise UsageError("name at least one prompt file")
        check_options(self)

    @property
    def document(self) -> dict[str, Any]:
        """The reading options and the row policy as the identity holds them."""
        return reading_document(self.reading, self.policy)


@dataclass(frozen=True, kw_only=True)
class Output:
    """The data set: where it is written, and how."""

    directory: Annotated[
        Path, Option("--out", "Directory of the data set. An unfinished one is resumed.")
    ] = DEFAULT_OUT
    shard_bytes: Annotated[
        int,
        Option(
            "--shard-size",
            "A shard is sealed before it grows beyond this, or its header beyond 16 MiB.",
            least=1,
            most=MAX_BYTES,
            default="4GiB",
        ),
    ] = DEFAULT_SHARD_BYTES
    file_mode: Annotated[
        int | None,
        Option(
            "--file-mode",
            "Permission bits of new files, such as 640 for readers of this user's group. New "
            "directories get the same, with search for readers.  [default: 600, or as the data set "
            "has them]",
            metavar="OCTAL",
        ),
    ] = None

    def __post_init__(self) -> None:
        check_options(self)
        if self.file_mode is None:
            return
        try:
            require_file_mode(self.file_mode, name="--file-mode")
        except SettingsError as error:
            raise UsageError(str(error)) from error

    @property
    def manifest_path(self) -> Path:
        return self.directory / MANIFEST_NAME

    @property
    def shards_path(self) -> Path:
        return self.directory / SHARDS_DIRECTORY


@dataclass(frozen=True, kw_only=True)
class Servers:
    """The servers to send prompts to, and the capture that they must have."""

    urls: Annotated[
        tuple[str, ...],
        Option(
            "--server",
            "Address of the server. Again for each further one: all must capture the same, and "
            "dump under the same --dump-dir. Unreachable servers are skipped and retried.  "
            f"[default: {DEFAULT_SERVER_URL}]",
            metavar="URL",
        ),
    ] = (DEFAULT_SERVER_URL,)
    dump_root: Annotated[
        Path, Option("--dump-dir", "Where the server's plugin puts its dumps.")
    ] = DEFAULT_DUMP_ROOT
    dump_owner: Annotated[
        int | None,  # user id
        Option(
            "--dump-owner",
            "User, by name or id, whose server writes the dumps, if it is not you. The group of "
            "--dump-dir may then write there; only files of that user, of you and of root are "
            "read.",
            least=0,
            most=MAX_COUNT,
            metavar="USER",
        ),
    ] = None
    api_key_file: Annotated[
        Path | None,
        Option(
            "--api-key-file",
            "File whose first line is the server's API key, which only you and perhaps its group "
            "can read (mode 600).  [default: the key in EXTRACTOR_API_KEY, if any]",
            metavar="PATH",
        ),
    ] = None
    # None: any model, whatever the servers capture.
    model: Annotated[
        str | None,
        Option(
            "--model",
            "When no server answers, start one with this model and stop it at the end. SGLang's "
            "own arguments go after --.",
            metavar="PATH",
        ),
    ] = None
    layers: Annotated[
        str | None,
        Option(
            "--layers",
            "Boundaries to capture: eagle3, or indices such as 3,31,59. Index b is the residual "
            "stream entering layer b.",
            metavar="LIST",
            default="eagle3",
        ),
    ] = None
    last_kind: Annotated[
        str | None,
        Option(
            "--last",
            "Last state to keep: after the final norm, before it, or both.",
            default="post",
        ),
    ] = None

    @property
    def dumps(self) -> DumpRoot:
        """The dump root, and whose files in it are trusted."""
        owner = self.dump_owner
        return DumpRoot(path=self.dump_root, owner=owner, is_shared=owner is not None)

    def __post_init__(self) -> None:
        check_options(self)
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

    concurrency: Annotated[
        int | None,  # None: automatic
        Option(
            "--concurrency",
            "Maximum requests in flight with each server; auto: as many as it reports to run and "
            "queue, at most 512.  [default: auto]",
            least=1,
            most=MAX_CONCURRENCY,
            metavar="N|auto",
        ),
    ] = None
    shm_budget_bytes: Annotated[
        int | None,
        Option(
            "--shm-budget",
            "Maximum dump bytes in /dev/shm.  [default: half of what is free and within the "
            "server's memory limits]",
            least=1,
            most=MAX_BYTES,
        ),
    ] = None
    num_movers: Annotated[
        int,
        Option(
            "--movers",
            "Threads that copy dumps to shards.  [default: a quarter of the cores, 2 to 8]",
            least=1,
            most=MAX_MOVERS,
        ),
    ] = field(default_factory=default_movers)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long and how often to try."""

    max_attempts: Annotated[
        int,
        Option(
            "--max-attempts",
            "Requests for one prompt before it is given up.",
            least=1,
            most=MAX_COUNT,
        ),
    ] = 4
    request_timeout_s: Annotated[
        float,
        Option(
            "--request-timeout",
            "From sending a prompt to its complete reply.",
            least=0.001,
            most=MAX_SECONDS,
        ),
    ] = 600.0
    dump_timeout_s: Annotated[
        float,
        Option(
            "--dump-timeout",
            "From the answer to the last piece of the dump.",
            least=0.001,
            most=MAX_SECONDS,
        ),
    ] = 60.0
    server_wait_s: Annotated[
        float,
        Option(
            "--server-wait",
            "How long to wait for a server: at the start until one is up, and when none is left.",
            least=0,
            most=MAX_SECONDS,
        ),
    ] = 0.0

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of one `extractor run`."""

    input: Input
    output: Output = Output()
    servers: Servers = Servers()
    load: Load = field(default_factory=Load)
    patience: Patience = Patience()
    retry_failed: Annotated[
        bool, Option("--retry-failed", "Try again the rows that an earlier session gave up.")
    ] = False
    allow_model_change: Annotated[
        bool,
        Option(
            "--allow-model-change",
            "Continue a data set although the server now computes different states: other "
            "weights, KV-cache dtype, quantization. Its rows are stored beside the old ones; "
            "dataset.json and the manifest record which server start computed each row.",
        ),
    ] = False

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

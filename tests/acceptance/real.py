"""A real SGLang server on the CPU, as the acceptance tests need it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from acceptance.tool import Server

CONTEXT_TOKENS = 512


@dataclass
class Real(Server):
    url: str
    root: Path


@contextmanager
def real_server(directory: Path) -> Iterator[Real]:
    """A tiny Llama in chunks of 32 tokens, so that most prompts come in several pieces."""
    from rig.models import tiny
    from rig.server import cpu_server

    model = tiny("llama", directory / "llama")
    with (
        tempfile.TemporaryDirectory(prefix="acceptance-", dir="/dev/shm") as root,
        cpu_server(
            model,
            dump_dir=Path(root),
            extra_args=(
                "--chunked-prefill-size", "32",
                "--context-length", str(CONTEXT_TOKENS),
                # Else it would spin on a core while other tests run.
                "--sleep-on-idle",
            ),
            # On a busy machine the threads of a team wait for each other longer than they work.
            env={"OMP_NUM_THREADS": "1"},
            log_path=directory / "server.log",
        ) as server,
    ):  # fmt: skip
        yield Real(url=server.url, root=Path(root))

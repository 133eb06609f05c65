"""A real SGLang server on the CPU, as the acceptance tests need it."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from acceptance.tool import Server
from extractor.process import descendants, remove_shared_memory, shared_memory_inodes

CONTEXT_TOKENS = 512


@dataclass
class Real(Server):
    url: str
    root: Path
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """SIGKILL to the whole tree, as a machine that runs out of memory does it."""
        tree = [self.process.pid, *(child.pid for child in descendants(self.process.pid))]
        inodes = shared_memory_inodes(tree)
        for pid in tree:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        remove_shared_memory(inodes)


@contextmanager
def real_server(
    directory: Path, *, root: Path | None = None, port: int | None = None
) -> Iterator[Real]:
    """A tiny Llama in chunks of 32 tokens, so that most prompts come in several pieces.

    root, port: of a server that this one takes the place of.
    """
    from rig.models import tiny
    from rig.server import cpu_server

    model = tiny("llama", directory / "llama")
    with (
        tempfile.TemporaryDirectory(prefix="acceptance-", dir="/dev/shm") as own_root,
        cpu_server(
            model,
            dump_dir=root or Path(own_root),
            port=port,
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
        yield Real(url=server.url, root=root or Path(own_root), process=server.process)

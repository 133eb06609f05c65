"""A real SGLang server on the CPU, as the acceptance tests need it, and what it must give."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from helpers import Ids, read_samples, stored_ordinals

from acceptance.tool import Server
from extractor.core.locations import MANIFEST_NAME
from extractor.system.process_tree import descendants
from manifest.exceptions import ManifestError

CONTEXT_TOKENS = 512
TOLERANCE = 1e-5  # relative, float32: batches differ from run to run


@dataclass
class Real(Server):
    url: str
    root: Path
    process: subprocess.Popen[bytes]

    def pause(self) -> None:
        """SIGSTOP to the whole tree: it holds what it has and answers nothing."""
        for pid in self._tree():
            os.kill(pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """The end of `pause`."""
        for pid in self._tree():
            os.kill(pid, signal.SIGCONT)

    def _tree(self) -> list[int]:
        return [self.process.pid, *(child.pid for child in descendants(self.process.pid))]

    def kill(self) -> None:
        """SIGKILL to the whole tree, as a machine that runs out of memory does it."""
        for pid in self._tree():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def real_server(
    directory: Path,
    *,
    root: Path | None = None,
    port: int | None = None,
    name: str = "server",
    extra_args: Sequence[str] = (),
) -> Iterator[Real]:
    """A tiny Llama in chunks of 32 tokens, so that most prompts come in several pieces.

    directory: holds the model in its folder `llama`, which is created if it does not exist.
    root, port: of a server that this one takes the place of. name: of its log in `directory`.
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
                *extra_args,
            ),
            # On a busy machine the threads of a team wait for each other longer than they work.
            env={"OMP_NUM_THREADS": "1"},
            log_path=directory / f"{name}.log",
        ) as server,
    ):  # fmt: skip
        yield Real(url=server.url, root=root or Path(own_root), process=server.process)


def stored(out: Path) -> int:
    """Rows that are stored by now; 0 where the run has not begun yet."""
    try:
        return len(stored_ordinals(out)) if (out / MANIFEST_NAME).exists() else 0
    except ManifestError:
        return 0


def assert_same(calm: Path, out: Path, prompts: list[Ids]) -> None:
    """Both hold `prompts`, with the same states within float noise."""
    undisturbed, survived = read_samples(calm), read_samples(out)
    assert set(survived) == set(undisturbed) == set(range(len(prompts)))
    for ordinal, sample in survived.items():
        assert (sample.ids, sample.mask) == (prompts[ordinal].ids, prompts[ordinal].mask)
        for name, values in sample.states.items():
            assert difference(values, undisturbed[ordinal].states[name]) < TOLERANCE


def difference(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max() / np.abs(other).max())

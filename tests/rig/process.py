"""Stops a server with everything it started, and removes what it leaves in /dev/shm. Linux only."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path

import psutil

# SGLang maps one such file per server and leaves it there when it is told to stop.
_ENGINE_SHM = "/dev/shm/sglang_loads_"


def stop_tree(process: subprocess.Popen[bytes], grace_s: float = 20.0) -> None:
    """Terminate `process`, kill what is left of its tree after `grace_s`, and wait for all of it.

    SIGTERM goes to `process` alone, so that it can stop its children in its own order.
    """
    tree = _tree(process.pid)
    leftovers = {path for member in tree for path in _engine_shm(member.pid)}
    process.terminate()
    _, alive = psutil.wait_procs(tree, timeout=grace_s)
    for member in alive:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(alive, timeout=grace_s)
    process.wait()
    for path in leftovers:
        path.unlink(missing_ok=True)


def _tree(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


def _engine_shm(pid: int) -> set[Path]:
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    # The sixth column is the mapped file; anonymous memory has none.
    mapped = (line.split(maxsplit=5)[-1] for line in maps.splitlines())
    return {Path(name) for name in mapped if name.startswith(_ENGINE_SHM)}

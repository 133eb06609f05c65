"""Stops a server with everything it started. Linux only."""

from __future__ import annotations

import subprocess
from contextlib import suppress

import psutil

from extractor.system.process_tree import descendants


def stop_tree(process: subprocess.Popen[bytes], grace_s: float = 20.0) -> None:
    """Terminate `process`, kill what is left of its tree after `grace_s`, and wait for all of it.

    SIGTERM goes to `process` alone, so that it can stop its children in its own order.
    """
    tree = descendants(process.pid)
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(tree, timeout=grace_s)
    for member in alive:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(alive, timeout=grace_s)

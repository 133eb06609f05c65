"""Stops a server with everything it started, and removes what it leaves in /dev/shm. Linux only."""

from __future__ import annotations

import subprocess
from contextlib import suppress

import psutil

from extractor.process import descendants, remove_shared_memory, shared_memory_inodes


def stop_tree(process: subprocess.Popen[bytes], grace_s: float = 20.0) -> None:
    """Terminate `process`, kill what is left of its tree after `grace_s`, and wait for all of it.

    SIGTERM goes to `process` alone, so that it can stop its children in its own order.
    """
    tree = descendants(process.pid)
    inodes = shared_memory_inodes([process.pid, *(member.pid for member in tree)])
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
    remove_shared_memory(inodes)

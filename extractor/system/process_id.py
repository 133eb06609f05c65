"""Identifies a process across pid reuse and PID namespaces."""

from __future__ import annotations

import os
from pathlib import Path


def is_same_process(pid: int, start_ticks: int, namespace: str | None) -> bool:
    """Whether the process that had this pid when it started then still runs.

    One in another PID namespace cannot be seen and is taken for alive: its files must not be
    touched.
    """
    if namespace not in (None, pid_namespace()):
        return True
    return process_start_ticks(pid) == start_ticks


def process_owner(pid: int, namespace: str | None) -> int | None:
    """The user id of a process, root's for one that is not dumpable; None when there is none, or it
    cannot be seen from here."""
    if namespace not in (None, pid_namespace()):
        return None
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def pid_namespace() -> str:
    """The name of this process's PID namespace."""
    return os.readlink("/proc/self/ns/pid")


def process_start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/<pid>/stat; None when there is no such process or it is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None  # any other error is not about that process
    # The second field, the command, may hold spaces and parentheses: count from its end.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])

"""Prepares the output directory and checks that data is safe there."""

from __future__ import annotations

from pathlib import Path

from extractor.core.errors import SpaceError, storage_error
from extractor.core.humanize import amount
from extractor.core.timings import DEFAULT_TIMINGS
from extractor.system.files import (
    MEMORY_FILE_SYSTEMS,
    file_system_type,
    free_bytes,
    require_directory,
)

NETWORK_FILE_SYSTEMS = (
    "nfs", "cifs", "smb", "fuse", "lustre", "ceph", "gpfs", "beegfs", "9p", "afs", "glusterfs",
    "virtiofs",
)  # fmt: skip


def manifest_warning(out: Path) -> str | None:
    """What is wrong with keeping a manifest on the file system of `out`; None when nothing is."""
    kind = file_system_type(out)
    if kind in MEMORY_FILE_SYSTEMS:
        return (
            f"warning: {out} is on {kind}: data set and manifest are lost with this machine's "
            "next start. Name an --out on a disk."
        )
    if kind.startswith(NETWORK_FILE_SYSTEMS):
        return (
            f"warning: {out} is on {kind}: SQLite's locks and its write-ahead log are not reliable "
            "on a network file system. Let no other host open the manifest while this run goes on, "
            "or name an --out on a local disk and copy it."
        )
    return None


def prepare_out(out: Path, *, min_free_bytes: int = DEFAULT_TIMINGS.store.min_free_bytes) -> None:
    """Make the output directory and check that it can be written.

    Raises UsageError, and SpaceError if less than `min_free_bytes` are free.
    """
    try:
        require_directory(out, option="--out")
        out.mkdir(parents=True, exist_ok=True)
        trial = out / ".writable"  # one name: what a killed run leaves is removed by the next
        trial.write_bytes(b"x")
        trial.unlink(missing_ok=True)
    except OSError as error:
        raise storage_error(error, where=out) from error
    if (free := free_bytes(out)) < min_free_bytes:
        raise SpaceError(
            f"{out}: only {amount(free)} free, a run begins with "
            f"{amount(min_free_bytes)} at least. Free space or name another --out."
        )

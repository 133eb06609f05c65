"""Edge: shard files without a manifest that knows of them: data that must not be written over."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from extractor.core.errors import UsageError
from extractor.core.locations import MANIFEST_NAME, SHARDS_DIRECTORY
from extractor.shards.format import shard_name
from extractor.shards.writer import OPEN_SHARDS, SEALED_SHARDS
from manifest.records import Shard


class ManifestLost(UsageError):
    """Shards without a manifest that knows of them."""


def require_manifest(out: Path) -> None:
    """Raise UsageError where shards lie beside a manifest file that is missing or empty."""
    path = out / MANIFEST_NAME
    if not path.exists():
        _refuse_any(out, f"{path} is missing")
    elif path.is_file() and not path.stat().st_size:
        _refuse_any(out, f"{path} is an empty file")


def require_begun(out: Path) -> None:
    """Raise UsageError where shards lie beside a manifest in which no data set was ever begun."""
    _refuse_any(out, f"{out / MANIFEST_NAME} knows of no data set")


def require_free_numbers(directory: Path, shards: Sequence[Shard]) -> None:
    """Raise UsageError where a sealed file that is none of `shards` has a name that a new shard
    would get: the manifest is an older one than the files.

    An open file that the manifest does not know is from a crash before it learnt of it.
    """
    next_name = shard_name(max((shard.number + 1 for shard in shards), default=0))
    names = {path.name for path in directory.glob(SEALED_SHARDS)}
    if strays := sorted(name for name in names if name >= next_name):
        _refuse(
            directory.parent, f"{directory.parent / MANIFEST_NAME} does not know of them", strays
        )


def _refuse_any(out: Path, what: str) -> None:
    directory = out / SHARDS_DIRECTORY
    names = [path.name for kind in (SEALED_SHARDS, OPEN_SHARDS) for path in directory.glob(kind)]
    if names:
        _refuse(out, what, sorted(names))


def _refuse(out: Path, what: str, names: Sequence[str]) -> None:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    raise ManifestLost(
        f"{out / SHARDS_DIRECTORY} holds {shown}, but {what}. A run would write over what is "
        f"there. Restore {MANIFEST_NAME} from a copy, or name another --out, or remove the shards."
    )

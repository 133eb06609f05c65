"""Names of files and directories that the commands share. Pure."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

DEFAULT_OUT = Path("extraction")


#: Of this user alone: in /dev/shm everybody may make a directory, with any name.
DEFAULT_DUMP_ROOT = Path(f"/dev/shm/hidden-states-{os.geteuid()}")


@dataclass(frozen=True, kw_only=True)
class DumpRoot:
    """A dump root, and who may write there beside this user and root."""

    path: Path = DEFAULT_DUMP_ROOT
    owner: int | None = None  # user id of the one whose server writes the dumps
    is_shared: bool = False  # its group may write, too: each file is told by its owner


MANIFEST_NAME = "manifest.sqlite"


DATASET_NAME = "dataset.json"


SHARDS_DIRECTORY = "shards"

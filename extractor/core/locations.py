"""Names of files and directories that the commands share. Pure."""

from __future__ import annotations

from pathlib import Path

DEFAULT_OUT = Path("extraction")


DEFAULT_DUMP_ROOT = Path("/dev/shm/hidden-states")


MANIFEST_NAME = "manifest.sqlite"


DATASET_NAME = "dataset.json"


SHARDS_DIRECTORY = "shards"

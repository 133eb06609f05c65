"""What stands on the command line -> the files that hold the rows."""

from __future__ import annotations

import filecmp
import glob
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, Final

import orjson

from prompts.compression import CHUNK_BYTES
from prompts.types import InputError

STDIN: Final = "-"
#: Hugging Face's `save_to_disk` writes these beside the Arrow files.
DATASET_STATE: Final = "state.json"
DATASET_SPLITS: Final = "dataset_dict.json"


def find_files(words: Iterable[str | Path]) -> list[str]:
    """The files that `words` name: paths, patterns (sorted), directories of Hugging Face datasets.

    Raises `InputError` for a pattern without a match, a directory of something else, and a file
    that is named twice.
    """
    paths: list[str] = []
    for word in (os.fspath(word) for word in words):
        if os.path.isdir(word):
            paths += _dataset_files(word)
        elif glob.has_magic(word) and not os.path.lexists(word):
            found = sorted(glob.glob(word, recursive=True))
            if not found:
                raise InputError(f"{word}: no file matches: check the pattern")
            paths += found
        else:
            paths.append(word)
    _require_once(paths)
    return paths


def _require_once(paths: Iterable[str]) -> None:
    """Its rows would be extracted twice: hardly what is meant, and hard to see afterwards."""
    seen: dict[str, str] = {}
    for path in paths:
        real = os.path.realpath(path)
        if (first := seen.get(real)) is not None:
            both = path if first == path else f"{first} and {path}"
            raise InputError(f"{both}: the same file is given twice: name it once")
        seen[real] = path


def spool(stream: BinaryIO, path: Path) -> None:
    """Copy the stream to `path`, so that it can be read twice and a later run can go on.

    Where `path` is there from an earlier run, the stream must be the same again or empty. Raises
    `InputError` where it is another, or where there is nothing to read at all.
    """
    new = spooled_in_part(path)
    try:
        try:
            with open(new, "wb") as copy:
                while data := stream.read(CHUNK_BYTES):
                    copy.write(data)
                copy.flush()
                os.fsync(copy.fileno())
                size_bytes = copy.tell()
        except OSError as exc:
            raise InputError(
                f"standard input cannot be kept in {path.parent} ({exc}): free space there, or "
                "save it to a file and name that"
            ) from exc
        if path.exists():
            if size_bytes and not filecmp.cmp(path, new, shallow=False):
                raise InputError(
                    f"standard input is not what {path} holds of an earlier run: "
                    "pipe in the same again, or nothing, or name another --out"
                )
        elif not size_bytes:
            raise InputError("standard input is empty: pipe a prompt file into it")
        else:
            os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def spooled_in_part(path: Path) -> Path:
    """Where `spool` writes until the stream is whole."""
    return path.with_name(path.name + ".new")


def _dataset_files(directory: str) -> list[str]:
    splits = _read_json(os.path.join(directory, DATASET_SPLITS))
    if splits is not None:
        names = splits.get("splits", []) if isinstance(splits, dict) else []
        found = " or ".join(os.path.join(directory, str(name)) for name in names[:8])
        raise InputError(f"{directory}: a data set of several splits: name {found}")
    state = _read_json(os.path.join(directory, DATASET_STATE))
    if not isinstance(state, dict) or not isinstance(state.get("_data_files"), list):
        raise InputError(
            f"{directory}: is a directory: name the files in it, such as '{directory}/*.jsonl'"
        )
    if state.get("_indices_files"):
        raise InputError(
            f"{directory}: its rows are chosen by an index beside the data: "
            "save it again after flatten_indices()"
        )
    return [os.path.join(directory, str(file["filename"])) for file in state["_data_files"]]


def _read_json(path: str) -> Any:
    try:
        with open(path, "rb") as file:
            return orjson.loads(file.read())
    except FileNotFoundError:
        return None
    except (OSError, orjson.JSONDecodeError) as exc:
        raise InputError(f"{path}: cannot be read ({exc})") from exc

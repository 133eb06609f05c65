"""What stands on the command line -> the files that hold the rows."""

from __future__ import annotations

import fcntl
import glob
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

import orjson

from prompts.compression import CHUNK_BYTES
from prompts.types import InputError
from server_patch.directory import Directory, UnsafeFile
from server_patch.settings import DEFAULT_FILE_MODE

STDIN: Final = "-"
#: What came in on standard input, kept where a run that goes on finds it.
SPOOL_NAME: Final = "stdin"
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


class Spool:
    """A copy of a stream, so that it can be read twice and a later run can go on."""

    def __init__(self, directory: Path, *, mode: int = DEFAULT_FILE_MODE) -> None:
        """`directory`: exists when the copy is made. `mode`: permission bits of the copy."""
        self._directory = directory
        self._mode = mode
        self._unfinished: str | None = None

    @property
    def path(self) -> Path:
        return self._directory / SPOOL_NAME

    def exists(self) -> bool:
        """Whether there is one, of an earlier run."""
        return os.path.lexists(self.path)

    def keep(self, stream: BinaryIO) -> None:
        """Copy the stream.

        Where there is a copy from an earlier run, the stream must be the same again or empty.
        Raises `InputError` where it is another, or where there is nothing to read at all.
        """
        try:
            with (
                Directory.open(self._directory) as directory,
                directory.new_file(mode=self._mode) as (self._unfinished, descriptor),
            ):
                self._keep(stream, directory, self._unfinished, descriptor)
        except UnsafeFile as exc:
            raise InputError(
                f"{exc.filename}: {exc.strerror}: standard input is kept there; move that away"
            ) from exc
        except OSError as exc:
            raise InputError(
                f"standard input cannot be kept in {self._directory} ({exc}): free space there, or "
                "save it to a file and name that"
            ) from exc
        finally:
            self._unfinished = None

    def _keep(self, stream: BinaryIO, directory: Directory, name: str, descriptor: int) -> None:
        # The stream may take long: a run that begins here meanwhile removes what is not locked.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        with open(descriptor, "r+b", closefd=False) as copy:
            while data := stream.read(CHUNK_BYTES):
                copy.write(data)
            copy.flush()
            os.fsync(descriptor)
            size_bytes = copy.tell()
            if directory.exists(SPOOL_NAME):
                is_same = _is_same(directory, copy)
                if size_bytes and not is_same:
                    raise InputError(
                        f"standard input is not what {self.path} holds of an earlier run: "
                        "pipe in the same again, or nothing, or name another --out"
                    )
                directory.unlink(name)
            elif not size_bytes:
                raise InputError("standard input is empty: pipe a prompt file into it")
            else:
                directory.rename(name, SPOOL_NAME)

    def forget(self) -> None:
        """Remove what has been copied so far, when it is not waited for any longer."""
        if (name := self._unfinished) is not None:
            with suppress(OSError), Directory.open(self._directory) as directory:
                directory.unlink(name)

    def remove(self) -> None:
        """Remove the copy."""
        self.path.unlink(missing_ok=True)


def _is_same(directory: Directory, copy: BinaryIO) -> bool:
    """Whether the file that is kept has the content of `copy`."""
    copy.seek(0)
    descriptor, _ = directory.open_file(SPOOL_NAME)
    with open(descriptor, "rb") as kept:
        while (data := copy.read(CHUNK_BYTES)) == kept.read(CHUNK_BYTES):
            if not data:
                return True
    return False


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

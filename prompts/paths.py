"""What stands on the command line -> the files that hold the rows."""

from __future__ import annotations

import fcntl
import glob
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

import orjson

from prompts.compression import CHUNK_BYTES
from prompts.regular_file import read_regular
from prompts.types import InputError
from server_patch.directory import Directory, UnsafeFile, component
from server_patch.fields import Document, FieldError, array, object_of, text
from server_patch.settings import DEFAULT_FILE_MODE

STDIN: Final = "-"
#: What came in on standard input, kept where a run that goes on finds it.
SPOOL_NAME: Final = "stdin"
#: Hugging Face's `save_to_disk` writes these beside the Arrow files.
DATASET_STATE: Final = "state.json"
DATASET_SPLITS: Final = "dataset_dict.json"
#: Of those two; each of a data set's files takes some 50.
MAX_STATE_BYTES: Final = 16 << 20
#: Of a name in a message.
MAX_NAME_CHARS: Final = 80


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
        self.mode = mode
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
                directory.new_file(mode=self.mode) as (self._unfinished, descriptor),
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
    try:
        splits = _read_document(os.path.join(directory, DATASET_SPLITS))
        if splits is not None:
            names = [str(name)[:MAX_NAME_CHARS] for name in array(splits, "splits")[:8]]
            found = " or ".join(os.path.join(directory, name) for name in names)
            raise InputError(f"{directory}: a data set of several splits: name {found}")
        state = _read_document(os.path.join(directory, DATASET_STATE))
        if state is None or "_data_files" not in state:
            raise InputError(
                f"{directory}: is a directory: name the files in it, such as '{directory}/*.jsonl'"
            )
        if state.get("_indices_files"):
            raise InputError(
                f"{directory}: its rows are chosen by an index beside the data: "
                "save it again after flatten_indices()"
            )
        count = len(array(state, "_data_files"))
        names = [text(state, f"_data_files.{number}.filename") for number in range(count)]
        return [_path_in(directory, name) for name in names]
    except FieldError as exc:
        raise InputError(
            f"{directory}: not a data set as save_to_disk writes it ({exc}): save it again, or "
            "name the files in it"
        ) from exc


def _path_in(directory: str, name: str) -> str:
    """A file's path. Raises `InputError` where it leads out of the directory."""
    path = os.path.join(directory, name)
    try:
        is_inside = os.path.dirname(os.path.realpath(path)) == os.path.realpath(directory)
        component(name)
    except (OSError, ValueError):  # ValueError: a surrogate that no file name has
        is_inside = False
    if not is_inside:
        raise InputError(
            f"{directory}: its {DATASET_STATE} names {name[:MAX_NAME_CHARS]!r}, which is not a "
            "file in it: save the data set again, or name the files"
        )
    return path


def _read_document(path: str) -> Document | None:
    """The JSON object in a file; None where there is no such file. Raises FieldError."""
    try:
        data = read_regular(path, max_bytes=MAX_STATE_BYTES)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise InputError(f"{path}: cannot be read ({exc})") from exc
    return object_of(data, what=os.path.basename(path), loads=orjson.loads)

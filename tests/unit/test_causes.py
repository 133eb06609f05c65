"""Every errno has a message and an exit status, and only disk errors are called disk failures."""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
from pathlib import Path

import pytest

from extractor.core.errors import OutputBusy, SpaceError, UsageError, exit_code, storage_error
from extractor.shards.output_dir import prepare_out
from extractor.system import lock, process_id
from extractor.system.lock import exclusive
from manifest.causes import CAUSES
from manifest.database import explained
from manifest.exceptions import ManifestDamaged, ManifestError, ManifestSpaceError

#: The only errnos that blame a device or a file system.
FAILURES = {"EIO", "EUCLEAN", "EBADMSG", "EREMOTEIO"}
FULL_OR_FAILING = FAILURES | {
    "ENOSPC", "EDQUOT", "ENOMEM", "ENODEV", "ENXIO", "ENOMEDIUM", "ESTALE", "ENOTCONN", "ESHUTDOWN",
    "EHOSTDOWN", "EINTR", "EAGAIN", "ETIMEDOUT",
}  # fmt: skip


@pytest.mark.parametrize("number", sorted(errno.errorcode), ids=lambda n: errno.errorcode[n])
def test_every_errno_has_a_cause_and_only_disk_errors_blame_the_disk(number: int) -> None:
    name = errno.errorcode[number]
    told = storage_error(OSError(number, os.strerror(number)), where=Path("out"))
    assert str(told).startswith("out: ")
    assert f"({name}: {os.strerror(number)})" in str(told)
    assert "run the same command again" in str(told)
    assert ("disk or its file system fails" in str(told)) == (name in FAILURES)
    assert exit_code(told) == (4 if name in FULL_OR_FAILING else 2)
    assert ("the operating system refused it" in str(told)) == (number not in CAUSES)


def test_the_file_that_an_error_names_is_shown() -> None:
    told = storage_error(PermissionError(errno.EACCES, "no", "/a/b"), where=Path("out"))
    assert str(told).startswith("/a/b: this user has no permission")


# --- SQLite -----------------------------------------------------------------------------------


def sqlite_error(code: str) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("words")
    error.sqlite_errorname = code
    return error


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        ("SQLITE_FULL", ManifestSpaceError, "no space left"),
        ("SQLITE_IOERR_WRITE", ManifestSpaceError, "disk or its file system fails"),
        ("SQLITE_IOERR_FSYNC", ManifestSpaceError, "disk or its file system fails"),
        ("SQLITE_IOERR_NOMEM", ManifestSpaceError, "out of memory"),
        ("SQLITE_IOERR_LOCK", ManifestError, "no working locks"),
        ("SQLITE_IOERR_SHMMAP", ManifestError, "does not support"),
        ("SQLITE_IOERR_SHORT_READ", ManifestDamaged, "not a sound manifest"),
        ("SQLITE_CANTOPEN", ManifestError, "words (SQLITE_CANTOPEN)"),
        ("SQLITE_CANTOPEN_ISDIR", ManifestError, "is a directory"),
        ("SQLITE_READONLY_DBMOVED", ManifestError, "does not exist"),
        ("SQLITE_READONLY", ManifestError, "no permission"),
        ("SQLITE_NOTADB", ManifestDamaged, "not a sound manifest"),
        ("SQLITE_CORRUPT_INDEX", ManifestDamaged, "not a sound manifest"),
        ("SQLITE_BUSY", ManifestError, "another process has the manifest locked"),
        ("SQLITE_BUSY_SNAPSHOT", ManifestError, "another process has the manifest locked"),
        ("SQLITE_LOCKED", ManifestError, "another process has the manifest locked"),
        ("SQLITE_PROTOCOL", ManifestError, "another process has the manifest locked"),
        ("SQLITE_MISMATCH", ManifestDamaged, "not a sound manifest"),
    ],
)
def test_sqlites_errors_name_their_cause(
    tmp_path: Path, code: str, kind: type[ManifestError], words: str
) -> None:
    path = tmp_path / "manifest.sqlite"
    path.touch()
    with pytest.raises(ManifestError) as caught, explained(path):
        raise sqlite_error(code)
    assert type(caught.value) is kind
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value)
    assert code in str(caught.value)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_broken_locks_are_not_reported_as_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = tmp_path / "manifest.sqlite"
    path.touch()

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with pytest.raises(ManifestError, match=r"no working locks .*SQLITE_BUSY"), explained(path):
        raise sqlite_error("SQLITE_BUSY")
    # An errno from probing the place does not replace an unrelated cause.
    with pytest.raises(ManifestError, match=r"disk or its file system fails"), explained(path):
        raise sqlite_error("SQLITE_IOERR_READ")


def test_a_manifest_that_another_process_locks_is_reported_as_locked(tmp_path: Path) -> None:
    path = tmp_path / "manifest.sqlite"
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    try:
        with pytest.raises(ManifestError, match="another process has the manifest locked"):
            with explained(path), sqlite3.connect(path, timeout=0) as other:
                other.execute("CREATE TABLE t (x)")
    finally:
        other.close()
        holder.close()


def test_too_many_open_files_is_the_cause_of_a_manifest_that_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "manifest.sqlite"
    path.touch()

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ManifestError, match=r"too many open files .*EMFILE"), explained(path):
        raise sqlite_error("SQLITE_CANTOPEN")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EFBIG, r"larger than .*EFBIG"),
        (errno.EDQUOT, r"quota is used up .*EDQUOT"),
        (errno.EACCES, r"disk or its file system fails .*EIO"),  # not the cause of this error
    ],
)
def test_the_cause_of_an_unwritable_manifest_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    path = tmp_path / "manifest.sqlite"
    path.write_bytes(bytes(8192))
    at: list[int] = []

    def refuse(descriptor: int, data: bytes, offset: int) -> int:
        at.append(offset)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(ManifestError, match=words), explained(path):
        raise sqlite_error("SQLITE_IOERR_WRITE")
    assert at == [8192]


def test_a_manifest_in_no_directory_is_said_to_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "manifest.sqlite"
    with pytest.raises(ManifestError, match=r"does not exist .*SQLITE_CANTOPEN"), explained(path):
        sqlite3.connect(path)


# --- the lock and the directory -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOLCK, "no working locks .ENOLCK"),
        (errno.ENOSYS, "no working locks .ENOLCK"),
        (errno.EOPNOTSUPP, "no working locks .ENOLCK"),
        (errno.EIO, "disk or its file system fails .EIO"),
    ],
)
def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises((UsageError, SpaceError), match=words), exclusive(tmp_path):
        pass


def test_a_held_lock_is_reported_as_another_process(tmp_path: Path) -> None:
    with exclusive(tmp_path), open(tmp_path / lock.LOCK_NAME) as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(OutputBusy), exclusive(tmp_path):
            pass


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("link", "is a link to nowhere, which does not exist"),
        ("link/below", "is a link to nowhere, which does not exist"),
        ("loop", "its symbolic links form a loop"),
        ("file", "is a file; name a directory"),
        ("file/below", "a part of the path is not a directory"),
        ("n" * 300, "the name is too long"),
    ],
)
def test_an_impossible_out_is_reported_with_its_cause(
    tmp_path: Path, name: str, words: str
) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=words):
        prepare_out(tmp_path / name)


def test_a_server_is_not_dead_because_we_have_too_many_open_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that is taken for dead loses its dumps."""

    def refuse(_: Path) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        process_id.is_same_process(os.getpid(), 1, None)

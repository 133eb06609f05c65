"""Operations relative to an open directory, and what each of them refuses."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from server_patch.directory import Directory, UnsafeFile, component

MAX_BYTES = 100


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Directory]:
    with Directory.open(tmp_path) as found:
        yield found


def modes(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


# --- names ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/passwd", "a\0b", "x" * 256, "../x"])
def test_a_name_that_is_no_single_component_is_refused_everywhere(
    directory: Directory, name: str
) -> None:
    with pytest.raises(UnsafeFile, match="not the name of a file"):
        component(name)
    for operation in (
        directory.subdirectory,
        directory.stat,
        directory.open_file,
        directory.unlink,
        directory.remove_subdirectory,
        directory.remove_tree,
        lambda name: directory.read(name, max_bytes=1),
        lambda name: directory.create(name, mode=0o600),
        lambda name: directory.open_to_write(name, mode=0o600),
        lambda name: directory.write_whole(name, [], mode=0o600),
        lambda name: directory.make_subdirectory(name, mode=0o700),
        lambda name: directory.rename(name, "good"),
        lambda name: directory.rename("good", name),
    ):
        with pytest.raises(UnsafeFile, match="not the name of a file"):
            operation(name)


@pytest.mark.parametrize("name", ["a", "...", ".hidden", "-rf", "a\nb", "ü", "x" * 255])
def test_odd_names_are_names(name: str) -> None:
    assert component(name) == name


# --- reading ----------------------------------------------------------------------------------


def make_unsafe(path: Path, kind: str) -> None:
    """Something that is not a regular file, where one belongs."""
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "link":
            path.with_name("target").write_bytes(b"secret")
            path.symlink_to(path.with_name("target"))
        case "dangling link":
            path.symlink_to("nowhere")
        case "device":
            path.symlink_to("/dev/zero")
        case "directory":
            path.mkdir()
        case "socket":
            with socket.socket(socket.AF_UNIX) as made:
                here = os.open(path.parent, os.O_RDONLY)
                try:  # its address may be shorter than a path
                    made.bind(f"/proc/self/fd/{here}/{path.name}")
                finally:
                    os.close(here)


UNSAFE = ("pipe", "link", "dangling link", "device", "directory", "socket")


@pytest.mark.parametrize("kind", UNSAFE)
def test_what_is_no_regular_file_is_neither_read_nor_written(
    directory: Directory, tmp_path: Path, kind: str
) -> None:
    make_unsafe(tmp_path / "x", kind)
    assert not directory.is_regular("x")
    assert directory.exists("x")
    with pytest.raises(UnsafeFile, match="not a regular file"):
        directory.open_file("x")
    with pytest.raises(UnsafeFile):
        directory.read("x", max_bytes=MAX_BYTES)
    with pytest.raises(OSError):
        directory.open_to_write("x", mode=0o600)
    with pytest.raises(FileExistsError):
        directory.create("x", mode=0o600)
    assert directory.file_names() == (["target"] if kind == "link" else [])
    if kind == "link":
        assert (tmp_path / "target").read_bytes() == b"secret"


def test_reading_is_bounded(directory: Directory, tmp_path: Path) -> None:
    (tmp_path / "most").write_bytes(b"x" * MAX_BYTES)
    assert directory.read("most", max_bytes=MAX_BYTES) == b"x" * MAX_BYTES
    (tmp_path / "more").write_bytes(b"x" * (MAX_BYTES + 1))
    with pytest.raises(OSError, match=f"larger than {MAX_BYTES} bytes"):
        directory.read("more", max_bytes=MAX_BYTES)
    # /proc states a size of 0 for its files.
    with Directory.open(Path("/proc/self")) as process, pytest.raises(OSError, match="larger"):
        process.read("maps", max_bytes=MAX_BYTES)


def test_a_file_of_another_user_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x")
    (tmp_path / "d").mkdir()
    me, other = os.geteuid(), os.geteuid() + 1
    with Directory.open(tmp_path, owners=[me]) as mine:
        assert mine.read("x", max_bytes=1) == b"x"
        assert mine.subdirectory("d").owners == frozenset({me})
    with Directory.open(tmp_path, owners=[other]) as theirs:
        with pytest.raises(UnsafeFile, match=f"belongs to user {me}"):
            theirs.read("x", max_bytes=1)
        with pytest.raises(UnsafeFile, match=f"belongs to user {me}"):
            theirs.subdirectory("d")


def test_errors_name_the_path(directory: Directory, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        directory.open_file("absent")
    assert caught.value.filename == str(tmp_path / "absent")


# --- directories ------------------------------------------------------------------------------


def test_a_link_is_no_subdirectory(directory: Directory, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert directory.subdirectory_names() == ["real"]
    with pytest.raises(OSError):
        directory.subdirectory("link")


def test_a_directory_that_is_made_has_exactly_the_mode(
    directory: Directory, tmp_path: Path
) -> None:
    os.chmod(tmp_path, 0o2700)
    before = os.umask(0o077)
    try:
        directory.make_subdirectory("made", mode=0o750).close()
    finally:
        os.umask(before)
    assert modes(tmp_path / "made") == 0o2750
    with pytest.raises(FileExistsError):
        directory.make_subdirectory("made", mode=0o700)


def test_a_link_in_place_of_a_directory_just_made_is_not_followed(
    directory: Directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user who may write to the parent swaps the directory after mkdir."""
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o711)
    os.chmod(victim, 0o711)
    real = os.mkdir

    def mkdir(path: str, mode: int, *, dir_fd: int) -> None:
        real(path, mode, dir_fd=dir_fd)
        (tmp_path / "boot").rmdir()
        (tmp_path / "boot").symlink_to(victim)

    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(OSError):
        directory.make_subdirectory("boot", mode=0o777)
    assert modes(victim) == 0o711


def test_a_directory_of_another_in_place_of_the_one_made_is_refused(
    directory: Directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UnsafeFile, match="not the directory that was made"):
        directory.make_subdirectory("boot", mode=0o777)


def test_a_removed_directory_is_missed_not_empty(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    with Directory.open(tmp_path / "d") as directory:
        assert directory.names() == []
        (tmp_path / "d").rmdir()
        for listing in (directory.names, directory.file_names, directory.subdirectory_names):
            with pytest.raises(FileNotFoundError) as caught:
                listing()
            assert caught.value.filename == str(tmp_path / "d")


def test_the_directory_stays_the_same_wherever_its_path_leads(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "other").mkdir()
    with Directory.open(tmp_path / "d") as directory:
        (tmp_path / "d").rename(tmp_path / "moved")
        (tmp_path / "d").symlink_to("other")
        directory.write_whole("x", [b"x"], mode=0o600)
    assert os.listdir(tmp_path / "moved") == ["x"]
    assert os.listdir(tmp_path / "other") == []


def test_two_threads_list_at_once(directory: Directory, tmp_path: Path) -> None:
    names = {f"{number}" for number in range(500)}
    for name in names:
        (tmp_path / name).touch()
    found: list[set[str]] = []

    def work() -> None:
        for _ in range(20):
            found.append(set(directory.names()))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    assert all(listed == names for listed in found)


# --- writing ----------------------------------------------------------------------------------


def test_a_second_name_of_a_file_is_not_written_through(
    directory: Directory, tmp_path: Path
) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    os.link(tmp_path / "precious", tmp_path / "x")
    with pytest.raises(UnsafeFile, match="second name"):
        directory.open_to_write("x", mode=0o600)
    directory.write_whole("x", [b"new"], mode=0o600)
    assert (tmp_path / "precious").read_bytes() == b"precious"
    assert (tmp_path / "x").read_bytes() == b"new"


def test_a_write_replaces_a_link_and_leaves_its_target(
    directory: Directory, tmp_path: Path
) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    (tmp_path / "x").symlink_to("precious")
    assert directory.write_whole("x", [b"a", memoryview(b"bc")], mode=0o640) == 3
    assert (tmp_path / "precious").read_bytes() == b"precious"
    assert not (tmp_path / "x").is_symlink()
    assert modes(tmp_path / "x") == 0o640


def test_temporary_names_are_random_and_exclusive(
    directory: Directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    names = []
    real = os.rename

    def rename(name: str, new: str, **places: int) -> None:
        names.append(name)
        real(name, new, **places)

    monkeypatch.setattr(os, "rename", rename)
    for _ in range(3):
        directory.write_whole("x", [b""], mode=0o600, writer="me-")
    assert len(set(names)) == 3
    assert all(name.startswith(".tmp-me-") and len(name) == 24 for name in names)
    # Even one that was guessed is not followed.
    monkeypatch.setattr(os, "urandom", bytes)
    (tmp_path / f".tmp-{'00' * 8}").symlink_to("precious")
    with pytest.raises(FileExistsError):
        directory.write_whole("x", [b"new"], mode=0o600)
    assert (tmp_path / "precious").read_bytes() == b"precious"


def test_unfinished_files_are_removed_by_writer_and_by_owner(
    directory: Directory, tmp_path: Path
) -> None:
    for name in (".tmp-a-1", ".tmp-a-2", ".tmp-b-1", "x"):
        (tmp_path / name).touch()
    (tmp_path / ".tmp-a-3").mkdir()
    (tmp_path / ".tmp-a-4").symlink_to("x")
    directory.owners = frozenset({os.geteuid() + 1})
    directory.remove_unfinished()
    assert len(os.listdir(tmp_path)) == 6
    directory.owners = None
    directory.remove_unfinished("a-")
    assert set(os.listdir(tmp_path)) == {".tmp-b-1", "x", ".tmp-a-3", ".tmp-a-4"}
    directory.remove_unfinished()
    assert set(os.listdir(tmp_path)) == {"x", ".tmp-a-3", ".tmp-a-4"}


# --- removing ---------------------------------------------------------------------------------


def test_a_tree_is_removed_and_nothing_that_its_links_point_at(
    directory: Directory, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    (home / "work").mkdir(parents=True)
    (home / "work" / "file").write_bytes(b"precious")
    (tmp_path / "tree" / "below").mkdir(parents=True)
    (tmp_path / "tree" / "below" / "link").symlink_to(home)
    (tmp_path / "tree" / "file").symlink_to(home / "work" / "file")
    os.link(home / "work" / "file", tmp_path / "tree" / "second name")
    directory.remove_tree("tree")
    assert os.listdir(tmp_path) == ["home"]
    assert (home / "work" / "file").read_bytes() == b"precious"


def test_a_link_is_no_tree(directory: Directory, tmp_path: Path) -> None:
    (tmp_path / "home" / "work").mkdir(parents=True)
    (tmp_path / "tree").symlink_to("home")
    with pytest.raises(OSError, match="symbolic link"):
        directory.remove_tree("tree")
    assert (tmp_path / "home" / "work").exists()


def test_a_directory_swapped_for_a_link_while_it_is_removed_is_not_followed(
    directory: Directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / "work").mkdir(parents=True)
    (tmp_path / "tree" / "below").mkdir(parents=True)
    real = os.open

    def swapping(path: str, flags: int, *args: int, **places: int) -> int:
        if path == "below":  # it was looked at, and is about to be entered
            monkeypatch.undo()
            (tmp_path / "tree" / "below").rmdir()
            (tmp_path / "tree" / "below").symlink_to(home)
        return real(path, flags, *args, **places)

    monkeypatch.setattr(os, "open", swapping)
    with pytest.raises(OSError):
        directory.remove_tree("tree")
    assert (home / "work").exists()

"""Which directories are opened as one's own, and which are refused, by name."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from server_patch.trust import UntrustedDirectory, open_or_make, open_trusted

OTHER = 54321
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "parent" / "root"
    path.mkdir(parents=True)
    for place in (path, path.parent):
        os.chmod(place, 0o755)
    return path


def refused(path: Path, **options: object) -> UntrustedDirectory:
    with pytest.raises(UntrustedDirectory) as caught:
        open_trusted(path, **options)  # type: ignore[arg-type]
    return caught.value


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o750, 0o500])
def test_a_directory_of_ours_is_opened(root: Path, mode: int) -> None:
    os.chmod(root, mode)
    with open_trusted(root) as directory:
        assert directory.path == root
        assert directory.owners == frozenset({0, os.geteuid()})


@pytest.mark.parametrize(
    ("mode", "who"),
    [(0o770, "its group"), (0o707, "others"), (0o777, "others"), (0o1777, "others")],
)
def test_one_that_others_can_write_to_is_refused(root: Path, mode: int, who: str) -> None:
    os.chmod(root, mode)
    error = refused(root)
    assert error.filename == str(root)
    assert f"can be changed by {who} (mode {mode:o})" in str(error)


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_so_is_one_in_a_parent_that_others_can_write_to(root: Path, mode: int) -> None:
    os.chmod(root.parent, mode)
    assert refused(root).filename == str(root.parent)
    os.chmod(root.parent, mode | stat.S_ISVTX)  # only owners rename
    open_trusted(root).close()


def test_a_group_may_share_a_directory_but_not_its_parent(root: Path) -> None:
    os.chmod(root, 0o2770)
    open_trusted(root, is_shared=True).close()
    os.chmod(root, 0o777)
    assert "by others" in str(refused(root, is_shared=True))
    os.chmod(root, 0o770)
    os.chmod(root.parent, 0o770)
    assert refused(root, is_shared=True).filename == str(root.parent)


def test_a_link_is_refused_with_what_it_points_at(root: Path) -> None:
    link = root.parent / "link"
    link.symlink_to(root)
    assert f"is a link to {root}" in str(refused(link))


def test_links_on_the_way_are_resolved(root: Path, tmp_path: Path) -> None:
    (tmp_path / "way").symlink_to(root.parent)
    with open_trusted(tmp_path / "way" / "root") as directory:
        assert directory.path == root
    with open_trusted(root / "..") as directory:
        assert directory.path == root.parent


def test_a_link_that_appears_on_the_way_is_not_followed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def swapping(path: str, *args: int, **places: int) -> int:
        if path == "root":  # its parent is checked
            monkeypatch.undo()
            root.rename(root.with_name("aside"))
            root.symlink_to("/etc")
        return real(path, *args, **places)

    monkeypatch.setattr(os, "open", swapping)
    with pytest.raises(OSError):
        open_trusted(root)


def test_what_is_missing_or_no_directory_is_an_error(root: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_trusted(root / "absent")
    (root / "file").touch()
    with pytest.raises(NotADirectoryError):
        open_trusted(root / "file")


def test_a_directory_is_made_with_its_mode_and_parents_that_nobody_else_writes_to(
    root: Path,
) -> None:
    before = os.umask(0)
    try:
        open_trusted(root / "a" / "b", is_shared=True, make_mode=0o770).close()
    finally:
        os.umask(before)
    assert [stat.S_IMODE(p.stat().st_mode) for p in (root / "a", root / "a" / "b")] == [
        0o755, 0o770,
    ]  # fmt: skip
    open_trusted(root / "a", make_mode=0o700).close()
    assert stat.S_IMODE((root / "a").stat().st_mode) == 0o755  # it keeps the mode that it had


def test_nothing_is_made_in_a_directory_that_others_can_write_to(root: Path) -> None:
    os.chmod(root, 0o777)
    assert refused(root / "made", make_mode=0o700).filename == str(root)
    assert os.listdir(root) == []


def test_the_first_of_two_processes_makes_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.mkdir

    def slower(path: str, mode: int, *, dir_fd: int) -> None:
        real(path, mode, dir_fd=dir_fd)
        real(path, mode, dir_fd=dir_fd)  # as if another had been faster

    monkeypatch.setattr(os, "mkdir", slower)
    with open_trusted(root) as parent, open_or_make(parent, "made", mode=0o700) as made:
        assert made.path == root / "made"


@needs_root
def test_one_of_another_user_is_refused_unless_named(root: Path) -> None:
    os.chown(root, OTHER, OTHER)
    error = refused(root)
    assert (error.owner, error.filename) == (OTHER, str(root))
    assert f"belongs to user {OTHER}" in str(error)
    with open_trusted(root, owners=[OTHER]) as directory:
        assert directory.owners == frozenset({0, OTHER})
    assert refused(root, owners=[OTHER + 1]).owner == OTHER


@needs_root
def test_a_parent_of_another_user_is_refused_even_with_the_sticky_bit(root: Path) -> None:
    os.chown(root.parent, OTHER, OTHER)
    os.chmod(root.parent, 0o1755)
    assert refused(root).filename == str(root.parent)

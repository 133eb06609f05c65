"""Files in /dev/shm are attributed to processes by what these have mapped."""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from extractor.system.shared_memory import (
    SHARED_MEMORY,
    mapped_inodes,
    remove_files,
    unused_files,
)


@pytest.fixture
def file() -> Iterator[Path]:
    """A file of a name that SGLang gives."""
    path = SHARED_MEMORY / f"sglang_loads_{secrets.token_hex(6)}_{secrets.token_hex(4)}.shm"
    path.write_bytes(bytes(4096))
    yield path
    path.unlink(missing_ok=True)


def test_a_file_is_unused_until_a_process_maps_it(file: Path) -> None:
    inode = file.stat().st_ino
    assert inode not in mapped_inodes([os.getpid()])
    assert unused_files()[file] == 4096
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ):
        assert inode in mapped_inodes([os.getpid()])
        assert file not in unused_files()
    assert file in unused_files()


def test_a_file_of_another_name_is_never_listed_or_removed() -> None:
    path = SHARED_MEMORY / f"another-{secrets.token_hex(6)}"
    path.touch()
    try:
        assert path not in unused_files()
        remove_files({path.stat().st_ino})
        assert path.exists()
    finally:
        path.unlink()


def test_files_are_removed_by_inode(file: Path) -> None:
    remove_files({file.stat().st_ino + 10**6})
    assert file.exists()
    remove_files({file.stat().st_ino})
    assert not file.exists()


def test_a_process_that_is_gone_has_nothing_mapped() -> None:
    assert mapped_inodes([2**22 + 1]) == set()

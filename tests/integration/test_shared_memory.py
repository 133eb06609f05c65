"""What a server leaves in /dev/shm is removed, however it ends, and nothing else is."""

from __future__ import annotations

import asyncio
import mmap
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from extractor.system import shared_memory
from extractor.system.process_tree import started
from extractor.system.shared_memory import SHARED_MEMORY, inodes_in_shared_memory, remove_abandoned

# Its child makes and maps what SGLang never removes, and a semaphore as tqdm does; both end at once
# by a signal, so that no exit handler of Python's removes anything.
DYING = """
import mmap, multiprocessing, os, signal, subprocess, sys

if len(sys.argv) == 2:
    subprocess.Popen([sys.executable, __file__, sys.argv[1], "child"])
    signal.pause()
with open(sys.argv[1], "wb+") as file:
    file.truncate(4096)
    kept = mmap.mmap(file.fileno(), 4096)
lock = multiprocessing.get_context("spawn").Lock()
os.write(1, f"/sem.{lock._semlock.name[1:]}".encode())
os.killpg(0, signal.SIGKILL)
"""


@pytest.fixture
def new_file() -> Iterator[Callable[[], Path]]:
    """Names as SGLang gives them, of files that may be made."""
    paths: list[Path] = []

    def new() -> Path:
        name = f"sglang_loads_{secrets.token_hex(6)}_{secrets.token_hex(4)}.shm"
        paths.append(SHARED_MEMORY / name)
        return paths[-1]

    yield new
    for path in paths:
        path.unlink(missing_ok=True)


async def test_what_a_server_that_ends_by_itself_made_is_removed(
    tmp_path: Path, new_file: Callable[[], Path]
) -> None:
    """Even where it dies in the moment that it made it."""
    loads = new_file()
    script = tmp_path / "server.py"
    script.write_text(DYING)
    command = [sys.executable, str(script), str(loads)]
    async with started(command, environment={}, log_path=tmp_path / "log") as server:
        async with asyncio.timeout(30):
            assert await server.wait() == -9
        semaphore = Path(f"{SHARED_MEMORY}{server.log_text()}")
        assert semaphore.is_file() and loads.exists()
    assert not semaphore.exists()
    assert not loads.exists()


@pytest.mark.parametrize("is_mapped", [False, True])
def test_a_file_that_somebody_holds_stays(
    new_file: Callable[[], Path], monkeypatch: pytest.MonkeyPatch, is_mapped: bool
) -> None:
    monkeypatch.setattr(shared_memory, "PAUSES_S", (0.0, 0.0))
    before = inodes_in_shared_memory()
    path = new_file()
    with path.open("wb+") as file:
        file.truncate(4096)
        held = mmap.mmap(file.fileno(), 4096) if is_mapped else open(path, "rb")
    with held:
        remove_abandoned(before)
        assert path.exists()
    remove_abandoned(before)
    assert not path.exists()


def test_a_file_of_before_stays(new_file: Callable[[], Path]) -> None:
    path = new_file()
    path.touch()
    remove_abandoned(inodes_in_shared_memory())
    assert path.exists()


def test_one_who_opens_a_file_while_it_is_removed_ends_nobody(
    new_file: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells the holder of a lease by SIGIO, which ends whoever does not expect it."""
    before = inodes_in_shared_memory()
    path, unlink = new_file(), Path.unlink
    path.touch()
    refused = []

    def opened_meanwhile(self: Path, missing_ok: bool = False) -> None:
        with pytest.raises(BlockingIOError) as caught:
            os.open(self, os.O_RDWR | os.O_NONBLOCK)
        refused.append(caught.value)
        unlink(self, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", opened_meanwhile)
    remove_abandoned(before)
    assert len(refused) == 1
    assert not path.exists()

"""AppendFile against a plain list of bytes, on a disk (direct writes) and in memory (buffered)."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extractor.system import direct_io
from extractor.system.direct_io import ALIGNMENT, BUFFER_BYTES, DIRECT_FILE_SYSTEMS, AppendFile
from extractor.system.files import file_system_type


@pytest.fixture(params=["disk", "memory"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path / "file"
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory) / "file"


def pattern(size: int, *, seed: int) -> bytes:
    return bytes((seed + number * 7) % 251 for number in range(min(size, 251))) * (size // 251 + 1)


SIZES = st.one_of(
    st.integers(1, 3 * ALIGNMENT),
    st.sampled_from([ALIGNMENT, BUFFER_BYTES - 1, BUFFER_BYTES, BUFFER_BYTES + ALIGNMENT + 3]),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), SIZES),
        st.tuples(st.just("sync"), st.just(0)),
        st.tuples(st.just("rewind"), st.integers(0, 100)),  # so many hundredths are kept
        st.tuples(st.just("reopen"), st.just(0)),
    ),
    max_size=12,
)


@given(steps=STEPS, begin=st.sampled_from([0, 8, ALIGNMENT, 5000]))
@settings(max_examples=40, deadline=None)
def test_the_file_holds_what_was_appended(steps: list[tuple[str, int]], begin: int) -> None:
    for root in (None, "/dev/shm"):
        with tempfile.TemporaryDirectory(dir=root) as directory:
            check_steps(Path(directory) / "file", steps, begin)


def opened(path: Path, *, position: int) -> AppendFile:
    return AppendFile(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), position=position)


def check_steps(path: Path, steps: list[tuple[str, int]], begin: int) -> None:
    model = bytearray(begin)  # nobody wrote the first bytes yet: zeros
    durable = begin
    file = opened(path, position=begin)
    for number, (step, amount) in enumerate(steps):
        match step:
            case "write":
                data = pattern(amount, seed=number)[:amount]
                file.write(data)
                model += data
            case "sync":
                file.sync()
                durable = len(model)
                assert path.read_bytes()[begin : len(model)] == model[begin:]
            case "rewind":
                # Never behind what was made durable: that belongs to the manifest.
                position = durable + (len(model) - durable) * amount // 100
                file.rewind(position)
                del model[position:]
            case "reopen":
                file.close()
                del model[durable:]
                file = opened(path, position=durable)
        assert file.position == len(model)
    head = b"head"[:begin]
    file.finish([head[:2], head[2:]])
    file.close()
    model[: len(head)] = head
    assert path.read_bytes() == model


def test_writes_are_direct_on_a_local_disk_and_only_there(path: Path) -> None:
    file = opened(path, position=0)
    flags = fcntl.fcntl(file._descriptor, fcntl.F_GETFL)
    file.close()
    assert bool(flags & os.O_DIRECT) == (file_system_type(path) in DIRECT_FILE_SYSTEMS)


def test_a_disk_that_refuses_our_alignment_gets_buffered_writes(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite

    def refusing(descriptor: int, data: memoryview, offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(descriptor, data, offset)

    preadv = os.preadv

    def refusing_too(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "pwrite", refusing)
    monkeypatch.setattr(os, "preadv", refusing_too)
    file = opened(path, position=0)
    file.write(b"abc" * 5000)
    file.sync()
    file.close()
    file = opened(path, position=15_000)  # in the midst of a block: it is read
    file.write(b"abc")
    file.finish([])
    file.close()
    assert path.read_bytes() == b"abc" * 5001


def test_what_cannot_be_written_is_kept_and_can_be_written_later(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = opened(path, position=0)
    file.write(b"abc" * 5000)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(direct_io, "write_at", full)
        with pytest.raises(OSError, match="No space"):
            file.sync()
    file.sync()
    file.finish([])
    file.close()
    assert path.read_bytes() == b"abc" * 5000

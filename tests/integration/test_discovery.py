"""Who is alive under a dump root, and whose files may be removed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import change_ready

from extractor.core.errors import BadDumpDir, PluginError, UsageError
from extractor.core.locations import DumpRoot
from extractor.dumps import discovery
from extractor.dumps.discovery import Writers, is_alive, ranks_of, scan_writers
from extractor.testing.fake_server import FakeServer
from server_patch.dump_format import READY_NAME, Ready, decode_ready, encode_ready
from server_patch.settings import DUMP_DIR


async def announced(dump_root: Path) -> tuple[Path, Ready]:
    server = FakeServer(dump_root)
    async with server.running():
        path = server.directory / READY_NAME
        return path, decode_ready(path.read_bytes())


async def test_a_process_is_alive_by_pid_and_start_time(dump_root: Path) -> None:
    _, ready = await announced(dump_root)
    assert is_alive(ready)
    assert not is_alive(change_ready(ready, pid_start_ticks=ready.process.start_ticks + 1))
    assert not is_alive(change_ready(ready, pid=2**22 + 1))


async def test_a_process_of_another_pid_namespace_cannot_be_called_dead(dump_root: Path) -> None:
    _, ready = await announced(dump_root)
    dead = change_ready(ready, pid_start_ticks=1, pid_namespace=os.readlink("/proc/self/ns/pid"))
    assert not is_alive(dead)
    assert is_alive(change_ready(dead, pid_namespace="pid:[1]"))


async def test_a_dead_server_is_told_from_one_that_never_was(dump_root: Path) -> None:
    with pytest.raises(BadDumpDir, match="holds no server's dumps"):
        ranks_of(scan_writers(DumpRoot(path=dump_root)), url="http://127.0.0.1:1", model_path="m")
    path, ready = await announced(dump_root)
    path.write_bytes(encode_ready(change_ready(ready, pid_start_ticks=1)))
    with pytest.raises(PluginError, match=f"are dead .pid {ready.process.pid}"):
        ranks_of(scan_writers(DumpRoot(path=dump_root)), url="http://127.0.0.1:1", model_path="m")


# --- a wrong --dump-dir -------------------------------------------------------------------------


def no_ranks(root: Path, url: str = "http://127.0.0.1:1") -> None:
    ranks_of(scan_writers(DumpRoot(path=root)), url=url, model_path="m")


def test_a_missing_dump_dir_is_an_error_unless_it_is_the_default(tmp_path: Path) -> None:
    with pytest.raises(BadDumpDir, match="absent does not exist"):
        no_ranks(tmp_path / "absent")
    # Not scanned: servers may dump there.
    default = Writers(root=DumpRoot(), alive=(), dead=(), failed=(), unreadable=())
    with pytest.raises(PluginError, match="has no plugin that dumps under"):
        ranks_of(default, url="http://127.0.0.1:1", model_path="m")


def test_a_dump_dir_that_is_a_file_or_a_dangling_link_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadDumpDir, match=r"cannot be read .Not a directory"):
        no_ranks(tmp_path / "file")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(
        BadDumpDir, match=r"link is a link to nowhere.* Name a directory, not a link"
    ):
        no_ranks(tmp_path / "link")


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.EACCES, "cannot be read .Permission denied"), (errno.EMFILE, "too many open files")],
)
def test_a_dump_dir_that_cannot_be_read_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UsageError, match=words):
        scan_writers(DumpRoot(path=tmp_path))


def test_the_servers_environment_reveals_its_dump_dir(tmp_path: Path) -> None:
    listen = (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); "
        "print(s.getsockname()[1], flush=True); input()"
    )
    there = tmp_path / "there"
    with subprocess.Popen(
        [sys.executable, "-c", listen],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, DUMP_DIR: str(there)},
    ) as process:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        with pytest.raises(BadDumpDir, match=rf"dumps under {there}, not under .*here"):
            no_ranks(tmp_path / "here", url)
        with pytest.raises(PluginError, match="has no plugin that dumps under"):
            no_ranks(there, url)


async def test_the_only_live_writer_is_not_taken_for_a_server_that_dumps_elsewhere(
    dump_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken it is where nothing is known of the server, as behind a tunnel."""
    server = FakeServer(dump_root)
    async with server.running():
        seen = scan_writers(DumpRoot(path=dump_root))
        model = seen.alive[0].ready.model.path
        url = "http://127.0.0.1:1"
        monkeypatch.setattr(discovery, "_dump_root_of_server", lambda _: "/elsewhere")
        with pytest.raises(BadDumpDir, match=r"dumps under /elsewhere, not .*Write --dump-dir"):
            ranks_of(seen, url=url, model_path=model)
        assert ranks_of(seen, url=server.url, model_path=model) == seen.alive
        for known in (None, str(dump_root)):
            monkeypatch.setattr(discovery, "_dump_root_of_server", lambda _, known=known: known)
            assert ranks_of(seen, url=url, model_path=model) == seen.alive


async def test_servers_with_the_same_port_are_distinguished_by_address(dump_root: Path) -> None:
    async with FakeServer(dump_root).running(host="::1") as one:
        port = int(one.url.rpartition(":")[2])
        async with FakeServer(dump_root).running(port=port) as other:
            for server, url in [
                (one, one.url), (one, f"http://[0:0:0:0:0:0:0:1]:{port}/llm"), (other, other.url),
            ]:  # fmt: skip
                (rank,) = ranks_of(
                    scan_writers(DumpRoot(path=dump_root)), url=url, model_path="fake/model"
                )
                assert rank.ready.boot_id == server.boot_id
            with pytest.raises(PluginError, match="several live servers"):
                no_ranks(dump_root, f"http://gpu-1:{port}")

"""Other users of the machine: nobody's files are read, emptied or removed but our own."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from helpers import (
    Notes,
    assert_whole,
    change_ready,
    dumps_under,
    make_prompts,
    options_for,
    run,
    run_options,
    write_prompts,
)

from extractor.core.errors import BadDumpDir, PluginError, exit_code
from extractor.core.locations import DEFAULT_DUMP_ROOT, DumpRoot
from extractor.dumps import discovery
from extractor.dumps.discovery import ranks_of, require_dump_directory, scan_writers
from extractor.dumps.dump_root import open_root
from extractor.pipeline.doctor import Check, examine
from extractor.servers.cleanup import find_leftovers, remove_boot, remove_leftovers, remove_useless
from extractor.testing.fake_server import FakeServer
from extractor.testing.faults import Fault
from server_patch.dump_format import READY_NAME, Ready, decode_ready, encode_ready

MODEL = "fake/model"
#: Users without an entry anywhere: the one of the server, the one of the client, and their group.
SERVER, CLIENT, GROUP = 54321, 54322, 54320


def ready_of(server: FakeServer) -> Ready:
    return decode_ready((server.directory / READY_NAME).read_bytes())


async def checks_of(root: DumpRoot, out: Path, *, clean: bool = False) -> dict[str, Check]:
    """What doctor says where no server answers, by the name of the check."""
    url = "http://127.0.0.1:9"
    found = examine(url=url, dump_root=root, out=out, server_wait_s=0, clean=clean)
    return {check.name: check async for check in found}


# --- the root -----------------------------------------------------------------------------------


def test_the_default_root_is_of_this_user() -> None:
    assert str(DEFAULT_DUMP_ROOT) == f"/dev/shm/hidden-states-{os.geteuid()}"


@pytest.mark.parametrize(("mode", "who"), [(0o777, "others"), (0o770, "its group")])
async def test_a_root_that_others_can_change_is_refused_by_name(
    tmp_path: Path, dump_root: Path, notes: Notes, mode: int, who: str
) -> None:
    async with FakeServer(dump_root).running() as server:
        os.chmod(dump_root, mode)
        path = write_prompts(tmp_path / "p.jsonl", make_prompts(2))
        with pytest.raises(BadDumpDir) as caught:
            await run(options_for(server, path, tmp_path / "out"), notes)
        message = str(caught.value)
        assert exit_code(caught.value) == 2
        assert f"{dump_root} can be changed by {who} (mode {mode:o})" in message
        bits = {0o777: "go", 0o770: "g"}[mode]
        assert f"chmod {bits}-w {dump_root}" in message
        assert ("--dump-owner" in message) == (mode == 0o770)
        checks = await checks_of(DumpRoot(path=dump_root), tmp_path / "out", clean=True)
        assert checks["dump root"].problem == message
        assert "leftovers" not in checks
        for work in (remove_useless, remove_leftovers, find_leftovers, scan_writers):
            with pytest.raises(BadDumpDir):
                work(DumpRoot(path=dump_root))
        # The group may share it, if that is asked for.
        shared = options_for(server, path, tmp_path / "out", dump_owner=os.geteuid())
        if mode == 0o770:
            await run(shared, notes)
        else:
            with pytest.raises(BadDumpDir):
                await run(shared, notes)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_root_of_another_user_is_refused_with_the_option_that_names_him(
    dump_root: Path,
) -> None:
    os.chown(dump_root, SERVER, GROUP)
    with pytest.raises(
        BadDumpDir, match=rf"user {SERVER}\. Name another .*trust .*--dump-owner {SERVER}"
    ):
        scan_writers(DumpRoot(path=dump_root))
    scan_writers(DumpRoot(path=dump_root, owner=SERVER))
    with pytest.raises(BadDumpDir):
        scan_writers(DumpRoot(path=dump_root, owner=CLIENT))


def test_a_root_is_made_for_this_user_alone(tmp_path: Path) -> None:
    root = DumpRoot(path=tmp_path / "a" / "root")
    assert open_root(root) is None
    assert open_root(root, make_mode=0o700) is not None
    assert stat.S_IMODE(root.path.stat().st_mode) == 0o700
    with pytest.raises(BadDumpDir, match="cannot be made"):
        open_root(DumpRoot(path=Path("/proc/root-of-dumps")), make_mode=0o700)


# --- what is planted in it ----------------------------------------------------------------------


def plant(path: Path, kind: str) -> None:
    """Something under the name `path` that is not a file of its own, or is endless."""
    path.parent.mkdir(parents=True, exist_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "zero":
            path.symlink_to("/dev/zero")
        case "link":
            path.symlink_to("/etc/passwd")
        case "directory":
            path.mkdir()
        case "socket":
            with socket.socket(socket.AF_UNIX) as made:
                here = os.open(path.parent, os.O_RDONLY)
                made.bind(f"/proc/self/fd/{here}/{path.name}")
                os.close(here)
        case "huge":
            path.touch()
            os.truncate(path, 1 << 40)
        case "deep":
            path.write_bytes(b"[" * 100_000)


KINDS = ("pipe", "zero", "link", "directory", "socket", "huge", "deep")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["READY.json", "FAILED.json"])
async def test_no_file_of_a_kind_hangs_or_ends_run_or_doctor(
    tmp_path: Path, dump_root: Path, notes: Notes, kind: str, name: str
) -> None:
    plant(dump_root / "evil" / "0" / name, kind)
    prompts = make_prompts(3)
    path = write_prompts(tmp_path / "p.jsonl", prompts)
    seen = scan_writers(DumpRoot(path=dump_root))
    assert (seen.alive, seen.dead, seen.failed) == ((), (), ())
    assert len(seen.unreadable) == 1 and "evil/0" in seen.unreadable[0]
    with pytest.raises(PluginError, match="cannot read what the plugin announced"):
        ranks_of(seen, url="http://127.0.0.1:1", model_path=MODEL)
    for clean in (False, True):
        checks = await checks_of(DumpRoot(path=dump_root), tmp_path / "out", clean=clean)
        assert checks["dump root"].problem is None
    async with FakeServer(dump_root).running() as server:
        await run(options_for(server, path, tmp_path / "out"), notes)
    assert_whole(tmp_path / "out", prompts)
    assert (dump_root / "evil" / "0" / name).exists()


@pytest.mark.parametrize("kind", KINDS)
async def test_no_file_of_a_kind_is_taken_for_a_dump(
    tmp_path: Path, dump_root: Path, notes: Notes, kind: str
) -> None:
    prompts = make_prompts(5)
    path = write_prompts(tmp_path / "p.jsonl", prompts)

    def planting(number: int, rid: str) -> Fault | None:
        if number == 2:
            plant(server.directory / "0000000777.safetensors", kind)
            plant(server.directory / "0000000778.error.json", kind)
        return None

    async with FakeServer(dump_root, faults=planting).running() as server:
        await run(options_for(server, path, tmp_path / "out"), notes)
    assert_whole(tmp_path / "out", prompts)


async def test_a_ready_that_names_another_directory_or_user_is_not_believed(
    tmp_path: Path, dump_root: Path, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if planted: it names the boot id and the process of a live server, and in its directory a
    link waits for the client's trial file."""
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    prompts = make_prompts(3)
    path = write_prompts(tmp_path / "p.jsonl", prompts)
    async with FakeServer(dump_root).running() as server:
        evil = dump_root / "evil" / "1"
        evil.mkdir(parents=True)
        (evil / READY_NAME).write_bytes(encode_ready(change_ready(ready_of(server), rank=1)))
        for name in (".tmp-client", ".tmp-READY.json"):
            (evil / name).symlink_to(precious)
            (server.directory / name).symlink_to(precious)
        seen = scan_writers(DumpRoot(path=dump_root))
        assert [rank.path for rank in seen.alive] == [server.directory]
        assert f"is of {server.boot_id}/1" in seen.unreadable[0]
        await run(options_for(server, path, tmp_path / "out"), notes)
        assert precious.read_bytes() == b"precious"
        monkeypatch.setattr(discovery, "process_owner", lambda pid, namespace: CLIENT)
        with pytest.raises(PluginError, match=f"names process .* of user {CLIENT}"):
            ranks_of(scan_writers(DumpRoot(path=dump_root)), url=server.url, model_path=MODEL)
    assert_whole(tmp_path / "out", prompts)


async def test_the_trial_file_has_a_random_name_and_is_gone(
    dump_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    real = os.open

    def opening(path: str, flags: int, *args: int, **places: int) -> int:
        if flags & os.O_CREAT:
            assert flags & os.O_EXCL and flags & os.O_NOFOLLOW
            made.append(path)
        return real(path, flags, *args, **places)

    async with FakeServer(dump_root).running() as server:
        ranks = scan_writers(DumpRoot(path=dump_root)).alive
        monkeypatch.setattr(os, "open", opening)
        require_dump_directory(ranks)
        require_dump_directory(ranks)
        assert len(set(made)) == 2
        assert os.listdir(server.directory) == [READY_NAME]


async def test_a_run_goes_on_in_its_directory_when_the_path_leads_elsewhere(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    prompts = make_prompts(30)
    path = write_prompts(tmp_path / "p.jsonl", prompts)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def at_10(number: int, rid: str) -> Fault | None:
        if number == 10:
            server.directory.rename(tmp_path / "moved")
            server.directory.symlink_to(elsewhere)
        return None

    async with FakeServer(dump_root, faults=at_10).running() as server:
        await run(options_for(server, path, tmp_path / "out"), notes)
    assert_whole(tmp_path / "out", prompts)
    assert os.listdir(elsewhere) == []
    assert os.listdir(tmp_path / "moved") == [READY_NAME]


async def test_a_second_name_of_a_precious_file_is_removed_and_the_file_stays(
    tmp_path: Path, dump_root: Path, notes: Notes
) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    prompts = make_prompts(5)
    path = write_prompts(tmp_path / "p.jsonl", prompts)

    def linking(number: int, rid: str) -> Fault | None:
        if number == 2:
            os.link(tmp_path / "precious", server.directory / "0000000777.safetensors")
        return None

    async with FakeServer(dump_root, faults=linking).running() as server:
        await run(options_for(server, path, tmp_path / "out"), notes)
    assert dumps_under(dump_root) == []
    assert (tmp_path / "precious").read_bytes() == b"precious"


# --- cleaning -----------------------------------------------------------------------------------


async def dead_server(dump_root: Path) -> FakeServer:
    server = FakeServer(dump_root)
    async with server.running():
        ready = change_ready(ready_of(server), pid_start_ticks=1)
        (server.directory / READY_NAME).write_bytes(encode_ready(ready))
    return server


@pytest.mark.parametrize("at", ["open", "scandir", "unlink", "rmdir"])
@pytest.mark.parametrize("clean", [remove_useless, remove_leftovers])
async def test_a_directory_swapped_for_a_link_while_cleaning_is_not_followed(
    tmp_path: Path,
    dump_root: Path,
    monkeypatch: pytest.MonkeyPatch,
    at: str,
    clean: Callable[[DumpRoot], object],
) -> None:
    """At each call of each kind in turn."""
    home = tmp_path / "home"
    (home / "0").mkdir(parents=True)
    (home / "0" / READY_NAME).write_bytes(b"precious")
    real = getattr(os, at)
    for nth in range(1, 200):
        server = await dead_server(dump_root)
        boot, calls = server.directory.parent, 0

        def swapping(*args: object, nth: int = nth, boot: Path = boot, **places: object) -> object:
            nonlocal calls
            calls += 1
            if calls == nth and boot.is_dir() and not boot.is_symlink():
                boot.rename(boot.with_name("aside"))
                boot.symlink_to(home)
            return real(*args, **places)

        with monkeypatch.context() as patched:
            patched.setattr(os, at, swapping)
            clean(DumpRoot(path=dump_root))
        assert (home / "0" / READY_NAME).read_bytes() == b"precious"
        for left in (boot, boot.with_name("aside")):
            if left.is_symlink():
                left.unlink()
            shutil.rmtree(left, ignore_errors=True)
        if calls < nth:
            break
    else:
        raise AssertionError("not every call was reached")


async def test_what_serve_removes_lies_in_the_root(tmp_path: Path, dump_root: Path) -> None:
    home = tmp_path / "home"
    (home / "work").mkdir(parents=True)
    (dump_root / "boot").symlink_to(home)
    (dump_root / "boot-1" / "0").mkdir(parents=True)
    (dump_root / "boot-1" / "0" / "link").symlink_to(home)
    (dump_root / "another").mkdir()
    remove_boot(DumpRoot(path=dump_root), "boot")
    assert (home / "work").exists()
    assert sorted(os.listdir(dump_root)) == ["another", "boot"]


# --- several users ------------------------------------------------------------------------------

needs_users = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory where every user may make files, each his own."""
    path = Path(tempfile.mkdtemp(prefix="shared-machine-", dir="/dev/shm"))
    os.chmod(path, 0o1777)
    yield path
    shutil.rmtree(path)


def _work(user: int, work: Callable[[Connection], object], ours: Connection) -> None:
    os.setgroups([])
    os.setresgid(GROUP, GROUP, GROUP)
    os.setresuid(user, user, user)
    try:
        ours.send((None, work(ours)))
    except BaseException as error:
        ours.send((type(error).__name__, str(error)))


def as_user(user: int, work: Callable[[Connection], object], stack: ExitStack) -> Connection:
    """Do `work` in a process of that user. It sends what it wants, and then its end: the name of
    an error or None, and the result."""
    theirs, ours = get_context("fork").Pipe()
    process = get_context("fork").Process(target=_work, args=(user, work, ours))
    process.start()

    def end() -> None:
        process.terminate()
        process.join()

    stack.callback(end)
    return theirs


def serve_as(user: int, root: Path, file_mode: int, stack: ExitStack) -> str:
    """The address of a fake server of that user."""

    async def serve(pipe: Connection) -> None:
        async with FakeServer(root, file_mode=file_mode).running() as server:
            pipe.send(server.url)
            await asyncio.Event().wait()

    theirs = as_user(user, lambda pipe: asyncio.run(serve(pipe)), stack)
    url = theirs.recv()
    assert isinstance(url, str), url
    return url


def extract(url: str, root: Path, out: Path, owner: int | None, _: Connection) -> None:
    options = run_options(
        prompts=(out.parent / "p.jsonl",), out=out, server_urls=(url,), dump_root=root,
        tokenizer="none", num_movers=1, dump_owner=owner,
    )  # fmt: skip
    asyncio.run(run(options, Notes()))


@needs_users
def test_two_users_of_a_group_share_a_root_when_both_say_so(place: Path) -> None:
    prompts = make_prompts(20)
    write_prompts(place / "p.jsonl", prompts)
    os.chmod(place / "p.jsonl", 0o644)
    root = place / "dumps"
    with ExitStack() as stack:
        url = serve_as(SERVER, root, 0o660, stack)
        assert stat.S_IMODE(root.stat().st_mode) == 0o770
        client = partial(as_user, CLIENT, stack=stack)
        refused = client(partial(extract, url, root, place / "refused", None)).recv()
        assert refused[0] == "BadDumpDir" and f"--dump-owner {SERVER}" in refused[1]
        refused = client(partial(extract, url, root, place / "refused", CLIENT)).recv()
        assert refused[0] == "BadDumpDir"
        assert client(partial(extract, url, root, place / "out", SERVER)).recv() == (None, None)
        assert dumps_under(root) == []
    assert (place / "out").stat().st_uid == CLIENT
    assert_whole(place / "out", prompts)


@needs_users
def test_a_file_of_a_third_user_in_a_shared_root_is_left_alone(place: Path) -> None:
    prompts = make_prompts(5)
    write_prompts(place / "p.jsonl", prompts)
    os.chmod(place / "p.jsonl", 0o644)
    root = place / "dumps"
    with ExitStack() as stack:
        url = serve_as(SERVER, root, 0o660, stack)
        (directory,) = root.glob("*/*")
        third = CLIENT + 1
        for name in ("0000000777.safetensors", "0000000778.error.json"):
            (directory / name).write_bytes(b"{}")
            os.chown(directory / name, third, GROUP)
        evil = root / "evil" / "0"
        evil.mkdir(parents=True)
        (evil / READY_NAME).write_bytes(b"{}")
        os.chown(evil / READY_NAME, third, GROUP)
        done = as_user(CLIENT, partial(extract, url, root, place / "out", SERVER), stack).recv()
        assert done == (None, None)
        assert sorted(path.name for path in directory.iterdir()) == [
            "0000000777.safetensors", "0000000778.error.json", READY_NAME,
        ]  # fmt: skip
        seen = scan_writers(DumpRoot(path=root, owner=SERVER, is_shared=True))
        assert f"belongs to user {third}" in seen.unreadable[0]
    assert_whole(place / "out", prompts)


@needs_users
def test_a_server_does_not_dump_where_another_user_made_the_root(place: Path) -> None:
    root = place / "dumps"
    root.mkdir()
    os.chown(root, CLIENT, GROUP)
    os.chmod(root, 0o777)

    async def serve(_: Connection) -> None:
        async with FakeServer(root).running():
            pass

    with ExitStack() as stack:
        done = as_user(SERVER, lambda pipe: asyncio.run(serve(pipe)), stack).recv()
    assert done[0] == "UntrustedDirectory"
    assert f"belongs to user {CLIENT}" in done[1]
    assert os.listdir(root) == []

"""An output directory, or a data set that was passed on, in which somebody planted something."""

from __future__ import annotations

import fcntl
import io
import json
import os
import sqlite3
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from helpers import (
    Notes,
    assert_whole,
    make_prompts,
    options_for,
    quick,
    run,
    write_prompts,
)
from hostile.damage import recompute_checksums, unseal

from extractor.cli.main import cli
from extractor.core.counters import Counters
from extractor.core.errors import UsageError, exit_code
from extractor.core.locations import MANIFEST_NAME
from extractor.core.run_options import RunOptions
from extractor.pipeline.run import run as run_of_product
from extractor.shards.writer import ShardWriter
from extractor.status.live_file import LIVE_NAME, LiveFile, live_problem
from extractor.status.overview import read_status
from extractor.system.lock import LOCK_NAME
from extractor.testing.fake_server import FakeServer
from extractor.verify.audit import audit
from extractor.verify.findings import FindingKind
from extractor.verify.repair import audit_and_repair
from manifest.decoding import STARTS, row_checksum
from manifest.exceptions import ManifestDamaged
from manifest.store import Store
from prompts.paths import SPOOL_NAME
from server_patch.directory import Directory

PROMPTS = make_prompts(6, shortest=10)
SHARD = "shards/shard-000000.safetensors"
OPEN_SHARD = "shards/.shard-000000.open"
CONTENT = b"not yours" * 1000


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A file elsewhere that no test may change, in a directory that gets no other file."""
    (tmp_path / "elsewhere").mkdir()
    path = tmp_path / "elsewhere" / "victim"
    path.write_bytes(CONTENT)
    yield path
    assert path.read_bytes() == CONTENT
    assert os.listdir(path.parent) == ["victim"]


@pytest.fixture
async def server(dump_root: Path) -> Any:
    async with FakeServer(dump_root).running() as server:
        yield server


@pytest.fixture
def options(server: FakeServer, tmp_path: Path) -> RunOptions:
    return options_for(server, write_prompts(tmp_path / "p.jsonl", PROMPTS), tmp_path / "out")


@pytest.fixture
async def out(options: RunOptions, notes: Notes) -> Path:
    """A finished data set."""
    await run(options, notes)
    return options.output.directory


def plant(path: Path, kind: str, victim: Path) -> None:
    """Put something in place of a file."""
    if path.is_dir():
        path.rename(path.with_name("moved"))
    path.unlink(missing_ok=True)
    match kind:
        case "link":
            path.symlink_to(victim)
        case "link to nowhere":
            path.symlink_to(victim.with_name("new"))
        case "link to a directory":
            path.symlink_to(victim.parent)
        case "second name":
            os.link(victim, path)
        case "pipe":
            os.mkfifo(path)
        case "socket":
            os.mknod(path, stat.S_IFSOCK | 0o600)


async def known_error(work: Any) -> BaseException | None:
    """The error of a command, which a person gets as a message; None if it has none."""
    try:
        await work
    except BaseException as error:
        assert exit_code(error) is not None, error
        return error
    return None


def status_of(command: str, out: Path) -> int:
    """The exit status of a command on a data set; what it raises must be meant for a person."""
    result = CliRunner().invoke(cli, [*command.split(), str(out)])
    if result.exception is None or isinstance(result.exception, SystemExit):
        return result.exit_code
    status = exit_code(result.exception)
    assert status is not None, result.exc_info
    return status


# --- an output directory in which files are planted -----------------------------------------------


@pytest.mark.parametrize("kind", ["link", "link to nowhere", "second name", "pipe", "socket"])
@pytest.mark.parametrize(
    "name",
    [
        ".writable", ".live.json.tmp", ".dataset.json.tmp", "stdin.new", LIVE_NAME, "dataset.json",
    ],
)  # fmt: skip
async def test_what_is_planted_under_a_name_of_ours_is_never_written_to(
    options: RunOptions, notes: Notes, victim: Path, name: str, kind: str
) -> None:
    out = options.output.directory
    (out / "shards").mkdir(parents=True)
    plant(out / name, kind, victim)
    await run(options, notes)
    assert_whole(out, PROMPTS)


@pytest.mark.parametrize("kind", ["link", "link to nowhere", "second name", "pipe", "socket"])
@pytest.mark.parametrize(
    "name",
    [
        LOCK_NAME, SHARD, MANIFEST_NAME, f"{MANIFEST_NAME}-wal", f"{MANIFEST_NAME}-shm",
        f"{MANIFEST_NAME}-journal", OPEN_SHARD,
    ],
)  # fmt: skip
async def test_what_is_planted_where_a_file_must_be_ours_is_refused_by_name(
    options: RunOptions, notes: Notes, victim: Path, name: str, kind: str
) -> None:
    out = options.output.directory
    (out / "shards").mkdir(parents=True)
    plant(out / name, kind, victim)
    error = await known_error(run(options, notes))
    assert error is not None
    assert Path(name).name in str(error)


@pytest.mark.parametrize("kind", ["link to a directory", "link to nowhere", "pipe"])
async def test_shards_go_to_no_other_directory(
    options: RunOptions, notes: Notes, victim: Path, kind: str
) -> None:
    out = options.output.directory
    out.mkdir()
    plant(out / "shards", kind, victim)
    with pytest.raises(UsageError, match=r"out/shards is a link or a file"):
        await run(options, notes)


async def test_a_link_that_the_user_names_is_followed(
    options: RunOptions, notes: Notes, tmp_path: Path
) -> None:
    (tmp_path / "large disk").mkdir()
    options.output.directory.symlink_to(tmp_path / "large disk")
    await run(options, notes)
    assert_whole(tmp_path / "large disk", PROMPTS)


@pytest.mark.parametrize("kind", ["link", "link to nowhere", "second name", "pipe"])
@pytest.mark.parametrize("name", [SPOOL_NAME, "stdin.new"])
async def test_standard_input_is_kept_in_no_file_of_others(
    server: FakeServer, tmp_path: Path, notes: Notes, victim: Path,
    monkeypatch: pytest.MonkeyPatch, name: str, kind: str,
) -> None:  # fmt: skip
    out = tmp_path / "out"
    out.mkdir()
    plant(out / name, kind, victim)
    rows = write_prompts(tmp_path / "p.jsonl", PROMPTS).read_bytes()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(rows)))
    error = await known_error(run(options_for(server, Path("-"), out), notes))
    if name == SPOOL_NAME:
        assert "stdin" in str(error)
    else:
        assert error is None
        assert (out / SPOOL_NAME).read_bytes() == rows
    assert [path for path in out.iterdir() if path.name.startswith(".tmp-")] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
@pytest.mark.parametrize("name", [LOCK_NAME, MANIFEST_NAME])
async def test_a_file_of_another_user_is_refused_unless_the_directory_is_theirs(
    options: RunOptions, notes: Notes, name: str
) -> None:
    out = options.output.directory
    out.mkdir()
    (out / name).touch()
    os.chown(out / name, 65534, -1)
    error = await known_error(run(options, notes))
    assert "belongs to user 65534" in str(error)
    os.chown(out, 65534, -1)
    await run(options, notes)
    assert_whole(out, PROMPTS)


async def test_what_a_killed_run_had_not_finished_is_removed_and_nothing_else(
    options: RunOptions, notes: Notes, victim: Path
) -> None:
    out = options.output.directory
    out.mkdir()
    (out / ".tmp-0123456789abcdef").write_bytes(bytes(100))
    (out / ".tmp-link").symlink_to(victim)
    with (out / ".tmp-locked").open("wb") as locked:  # by another run, which reads standard input
        fcntl.flock(locked, fcntl.LOCK_EX)
        await run(options, notes)
    assert {path.name for path in out.iterdir()} == {
        ".tmp-link", ".tmp-locked", LOCK_NAME, "dataset.json", MANIFEST_NAME, "shards",
    }  # fmt: skip


# --- a swap between the look at a file and its use ------------------------------------------------


async def test_a_manifest_that_is_swapped_before_sqlite_opens_it_is_not_written_to(
    options: RunOptions, notes: Notes, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.sqlite"
    sqlite3.connect(other).close()
    connection = sqlite3.connect(other)
    connection.execute("CREATE TABLE precious (value)")
    connection.commit()
    connection.close()
    before, real = other.read_bytes(), sqlite3.connect

    def swapped(name: str, *args: Any, **kwargs: Any) -> sqlite3.Connection:
        if MANIFEST_NAME in name:
            (out / MANIFEST_NAME).unlink()
            (out / MANIFEST_NAME).symlink_to(other)
        connection: sqlite3.Connection = real(name, *args, **kwargs)
        return connection

    monkeypatch.setattr(sqlite3, "connect", swapped)
    with pytest.raises(ManifestDamaged, match="another file was put in its place meanwhile"):
        await run(options, notes)
    assert other.read_bytes() == before
    assert sorted(path.name for path in tmp_path.glob("other*")) == ["other.sqlite"]


async def test_a_shards_directory_that_is_swapped_for_a_link_gets_no_more_files_through_it(
    options: RunOptions, notes: Notes, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real = options.output.directory, os.open

    def swapping(name: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if str(name).endswith("shard-000000.open") and not (out / "moved").exists():
            plant(out / "shards", "link to a directory", victim)
        return real(name, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", swapping)
    await run(options, notes)
    assert os.listdir(out / "moved") == ["shard-000000.safetensors"]
    assert FindingKind.SHARD_MISSING in audit(out).findings.counts


async def test_a_repair_removes_shards_of_the_directory_that_it_opened_only(
    options: RunOptions, out: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (out / SHARD).write_bytes(b"damaged")
    theirs = victim.parent / Path(SHARD).name
    theirs.write_bytes(CONTENT)
    real = ShardWriter.create

    def create(*args: Any, **kwargs: Any) -> ShardWriter:
        plant(out / "shards", "link to a directory", victim)
        return real(*args, **kwargs)

    monkeypatch.setattr(ShardWriter, "create", create)
    _, repair = audit_and_repair(out)
    assert repair.shards == 1
    assert os.listdir(out / "moved") == []
    assert theirs.read_bytes() == CONTENT
    theirs.unlink()


# --- a data set that was passed on ----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["link", "second name", "pipe", "socket"])
@pytest.mark.parametrize(
    "name",
    [
        MANIFEST_NAME, f"{MANIFEST_NAME}-wal", f"{MANIFEST_NAME}-journal", "dataset.json",
        LIVE_NAME, LOCK_NAME, SHARD,
    ],
)  # fmt: skip
async def test_no_command_waits_at_a_planted_file_or_writes_through_it(
    options: RunOptions, notes: Notes, out: Path, victim: Path, name: str, kind: str
) -> None:
    plant(out / name, kind, victim)
    for command in ("status", "verify", "verify --repair", "status --json"):
        status = status_of(command, out)
        if command == "verify" and name != LOCK_NAME:
            assert status == 1
    await known_error(run(options, notes))


@pytest.mark.parametrize(
    "name",
    ["{victim}", "../../elsewhere/victim", "../dataset.json", "shard-000001.safetensors", "", "."],
)
async def test_no_name_in_the_manifest_becomes_a_path(
    options: RunOptions, notes: Notes, out: Path, victim: Path, name: str
) -> None:
    change(out, "UPDATE shards SET name = ?", name.format(victim=victim))
    with pytest.raises(ManifestDamaged, match=r"must be shard-000000\.safetensors"):
        await run(options, notes)
    data = bytearray((out / SHARD).read_bytes())
    data[-1] ^= 1
    (out / SHARD).write_bytes(data)
    found, repair = audit_and_repair(out)
    assert FindingKind.MANIFEST_DAMAGED in found.findings.counts
    assert (repair.manifest, repair.shards, repair.planned) == (True, 1, 1)
    assert (out / "dataset.json").exists()
    await run(options, notes)
    assert_whole(out, PROMPTS)


@pytest.mark.parametrize("kind", ["link", "second name", "pipe", "socket"])
@pytest.mark.parametrize("name", [SHARD, OPEN_SHARD])
async def test_an_open_shard_is_filled_up_only_where_it_is_a_file_of_ours(
    options: RunOptions, notes: Notes, out: Path, victim: Path, name: str, kind: str
) -> None:
    unseal(out)
    (out / OPEN_SHARD).rename(out / "shards/.away")
    plant(out / name, kind, victim)
    error = await known_error(run(options, notes))
    if name == OPEN_SHARD or kind != "second name":
        assert f"{out / name}: " in str(error)
    else:  # read as a shard that was sealed
        assert status_of("verify", out) == 1


def change(out: Path, statement: str, *values: object) -> None:
    connection = sqlite3.connect(out / MANIFEST_NAME)
    with connection:
        connection.execute(statement, values)
        recompute_checksums(connection)
        names = ", ".join(STARTS)
        for row in connection.execute(f"SELECT {names} FROM server_starts").fetchall():
            connection.execute("UPDATE server_starts SET checksum = ?", [row_checksum(STARTS, row)])
    connection.close()


DEEP = "[" * 250 + "]" * 250
#: What the manifest may state, as statements.
STATED = [
    *(
        f"UPDATE identity SET value = '{value}' WHERE name = '{name}'"
        for name in ("reading", "boundaries", "run_id", "libraries", "model", "num_layers")
        for value in (DEEP, '{"a": ' + DEEP + "}", "1" * 40, "Infinity", "[1]", "{}", '"\x1b[31m"')
    ),
    *(
        f"UPDATE server_starts SET facts = '{value}'"
        for value in (DEEP, '{"settings": "attention_backend"}', '{"settings": [1]}', "{}", "NaN")
    ),
    "UPDATE server_starts SET accepted = '[{}]'",
    "UPDATE server_starts SET canary_error = 9e999",
    "UPDATE shards SET data_start = 4",
    "UPDATE shards SET data_start = 1 << 61, is_sealed = 0, digest = NULL",
    "UPDATE shards SET end_bytes = 1 << 62",
    "UPDATE prompts SET ordinal = ordinal + 1000",
    "UPDATE sources SET path = '/etc/passwd' || char(27)",
]


@pytest.mark.slow
@pytest.mark.parametrize("statement", STATED, ids=lambda text: text[:70])
async def test_whatever_the_manifest_states_each_command_has_an_answer(
    options: RunOptions, notes: Notes, out: Path, statement: str
) -> None:
    change(out, statement)
    for command in ("status --json", "verify --json", "verify"):
        status_of(command, out)
    (out / SHARD).unlink()
    await known_error(run(options, notes))


@pytest.mark.parametrize(
    ("change", "is_sound"),
    [
        ({"pid": -1}, False), ({"pid": 1.5}, False), ({"pid": 1 << 70}, False),
        ({"pid_namespace": ""}, False), ({"written_at": -1}, False), ({"session": None}, False),
        ({"more": [[[]]]}, True),
    ],
    ids=str,
)  # fmt: skip
def test_the_live_file_is_checked_field_by_field(
    tmp_path: Path, change: dict[str, object], is_sound: bool
) -> None:
    file = LiveFile(Directory.open(tmp_path))
    file.update(Counters())
    assert file._writing is not None
    file._writing.result()
    document = json.loads((tmp_path / LIVE_NAME).read_bytes())
    (tmp_path / LIVE_NAME).write_text(json.dumps({**document, **change}))
    assert (live_problem(tmp_path) is None) is is_sound
    file.close()


async def test_a_field_that_no_session_writes_is_shown_by_no_status(
    options: RunOptions, out: Path
) -> None:
    """It may be nested so deeply that no JSON of ours can hold it."""
    file = LiveFile(Directory.open(out))
    file.update(Counters())
    assert file._writing is not None
    file._writing.result()
    text = (out / LIVE_NAME).read_text()
    (out / LIVE_NAME).write_text(text.replace('"session":{', f'"session":{{"more":{DEEP},'))
    live = read_status(out).to_document()["live"]
    assert live is not None
    assert "more" not in live
    file.close()


# --- permission bits ------------------------------------------------------------------------------


class Modes(Notes):
    """Remembers the permission bits of every file of a run while it goes on."""

    def __init__(self, out: Path) -> None:
        super().__init__()
        self._out = out
        self.seen: dict[str, int] = {}

    def update(self, counters: Counters) -> None:
        for path in [self._out, *self._out.rglob("*")]:
            try:
                mode = stat.S_IMODE(path.lstat().st_mode)
            except FileNotFoundError:  # a file under a temporary name
                continue
            if not path.name.startswith(".tmp-"):  # its bits are just being set
                self.seen[str(path.relative_to(self._out))] = mode


@pytest.fixture
def umask() -> Iterator[Callable[[int], None]]:
    before = os.umask(0o022)
    yield lambda mask: void(os.umask(mask))
    os.umask(before)


def void(_: object) -> None:
    pass


@pytest.mark.parametrize(
    ("file_mode", "mask", "directory_mode"),
    [(None, 0o000, 0o700), (0o640, 0o077, 0o750), (0o664, 0o022, 0o775)],
)
async def test_files_have_exactly_the_mode_that_is_asked_for(
    server: FakeServer, tmp_path: Path, umask: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    file_mode: int | None, mask: int, directory_mode: int,
) -> None:  # fmt: skip
    rows = write_prompts(tmp_path / "p.jsonl", PROMPTS).read_bytes()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(rows)))
    out = tmp_path / "made" / "out"
    changes = {} if file_mode is None else {"file_mode": file_mode}
    umask(mask)
    modes = Modes(out)
    timings = quick(status={"live_interval_s": 0.0, "report_interval_s": 0.0})
    await run_of_product(options_for(server, Path("-"), out, **changes), modes, timings=timings)
    modes.update(Counters())
    files = {
        LOCK_NAME, SPOOL_NAME, "dataset.json", MANIFEST_NAME, f"{MANIFEST_NAME}-wal",
        f"{MANIFEST_NAME}-shm", "shards/.shard-000000.open", SHARD, LIVE_NAME,
    }  # fmt: skip
    directories = {".", "shards"}
    assert modes.seen.keys() == files | directories
    assert stat.S_IMODE(out.parent.stat().st_mode) == directory_mode
    wrong = {
        name: oct(mode)
        for name, mode in modes.seen.items()
        if mode != (directory_mode if name in directories else file_mode or 0o600)
    }
    assert wrong == {}


@pytest.mark.parametrize("asked", [None, 0o600])
async def test_new_files_of_a_data_set_get_the_mode_asked_for_or_else_the_manifests(
    options: RunOptions, notes: Notes, out: Path, asked: int | None
) -> None:
    for path in [out, *out.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    data = bytearray((out / SHARD).read_bytes())
    data[-1] ^= 1
    (out / SHARD).write_bytes(data)
    audit_and_repair(out)  # has no option: the manifest's mode
    (repaired,) = (out / "shards").iterdir()
    assert stat.S_IMODE(repaired.stat().st_mode) == 0o644
    output = replace(options.output, file_mode=asked)
    await run(replace(options, output=output), notes)
    warning = f"--file-mode 600 is given to new files only. Run chmod for those that {out} has"
    assert (warning in str(notes.messages)) == (asked is not None)
    assert_whole(out, PROMPTS)
    new = asked or 0o644
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in out.rglob("*")}
    again = f"shard-{int(repaired.stem[-6:]) + 1:06d}.safetensors"
    assert modes == {
        "shards": 0o755, repaired.name: 0o644, again: new, LOCK_NAME: 0o644,
        MANIFEST_NAME: 0o644, "dataset.json": new,
    }  # fmt: skip


@pytest.mark.parametrize("mode", ["9", "rw", "0o1000", "444", "777", "60", ""])
def test_a_mode_that_no_file_can_have_is_refused(mode: str) -> None:
    result = CliRunner().invoke(cli, ["run", "p.jsonl", "--file-mode", mode])
    assert result.exit_code == 2 or isinstance(result.exception, UsageError)
    assert "octal" in result.output + str(result.exception)


def test_the_names_of_a_store_are_checked_where_it_is_read(out: Path) -> None:
    change(out, "UPDATE shards SET name = 'x'")
    store = Store.open_read_only(out / MANIFEST_NAME)
    with pytest.raises(ManifestDamaged, match="name is 'x'"):
        store.shards()
    assert [str(damage) for damage in store.checked_shard_names()] == [
        "shards, row 0: name is 'x', must be shard-000000.safetensors"
    ]
    store.close()

"""Files of a data set: manifest, shards, dataset.json, .live.json, .lock."""

from __future__ import annotations

import os
import random
import re
import shutil
import sqlite3
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
from hostile.damage import look_at, make_data_set, recompute_checksums

from extractor.core.counters import Counters, Moment, ServerNow
from extractor.core.errors import ExtractorError
from extractor.core.locations import DATASET_NAME, MANIFEST_NAME
from extractor.shards.format import decode_shard_header
from extractor.status.live_file import LIVE_NAME, live_problem, read_live
from extractor.status.report import session_document
from extractor.system.lock import LOCK_NAME, writer_of
from extractor.system.process_id import pid_namespace, process_start_ticks
from extractor.verify.audit import audit
from fuzz.mutation import KINDS, ODD, Raw, mutated_bytes, mutated_json, put, remove
from fuzz.target import Run, Target
from manifest.exceptions import ManifestError

Change = Callable[[bytes, random.Random], bytes]


def _verify(out: Path) -> None:
    """Audit a data set; the result must be fit for a person and a program."""
    found = audit(out, fast=True)
    orjson.dumps(found.to_document())
    found.to_text().encode()


def _place(path: Path, data: bytes, chance: random.Random) -> None:
    remove(path)
    if chance.random() < 0.03:
        put(path, chance.choice(KINDS))
    else:
        path.write_bytes(data)


def _run_on(path: Path, change: Change, *readers: Callable[[Path], object]) -> Run:
    """Change one file of a data set, read the data set, and restore the file."""
    sound = path.read_bytes()
    out = path.parent if path.parent.name == "out" else path.parent.parent

    def run(chance: random.Random) -> None:
        _place(path, change(sound, chance), chance)
        try:
            for read in readers:
                read(out)
        finally:
            remove(path)
            path.write_bytes(sound)
            for suffix in ("-wal", "-shm", "-journal"):
                remove(path.with_name(path.name + suffix))

    return run


def _json_or_bytes(data: bytes, chance: random.Random) -> bytes:
    return (mutated_json if chance.random() < 0.8 else mutated_bytes)(data, chance)


def prepare_provenance(directory: Path) -> Run:
    return _run_on(make_data_set(directory) / DATASET_NAME, _json_or_bytes, _verify)


def prepare_live(directory: Path) -> Run:
    """The file of a session that runs: this process."""
    out = make_data_set(directory)
    server = ServerNow(url="http://a", is_up=True, in_flight=1, request_limit=2, num_prompts=3)
    document = {
        "pid": os.getpid(),
        "pid_start_ticks": process_start_ticks(os.getpid()),
        "pid_namespace": pid_namespace(),
        "written_at": 1e9,
        "session": session_document(Counters(now=Moment(servers=(server,)))),
    }
    (out / LIVE_NAME).write_bytes(orjson.dumps(document))
    return _run_on(out / LIVE_NAME, _json_or_bytes, live_problem, read_live, look_at)


def prepare_lock(directory: Path) -> Run:
    out = make_data_set(directory)
    held = f"{os.getppid()} {process_start_ticks(os.getppid())} {pid_namespace()}"
    (out / LOCK_NAME).write_text(held)

    def change(data: bytes, chance: random.Random) -> bytes:
        if chance.random() < 0.5:
            return mutated_bytes(data, chance)
        words: list[object] = list(data.split())
        words[chance.randrange(3)] = chance.choice(ODD)
        return b" ".join(
            word if isinstance(word, bytes) else str(getattr(word, "text", word)).encode()
            for word in words
        )

    return _run_on(out / LOCK_NAME, change, writer_of)


def prepare_shard(directory: Path) -> Run:
    path = make_data_set(directory) / "shards" / "shard-000000.safetensors"

    def change(data: bytes, chance: random.Random) -> bytes:
        if chance.random() < 0.5:
            return mutated_bytes(data, chance)
        (length,) = struct.unpack_from("<Q", data)
        header = mutated_json(data[8 : 8 + length], chance)
        if chance.random() < 0.7 and len(header) <= length:
            header = header.ljust(length)  # the samples keep their places
        return struct.pack("<Q", len(header)) + header + data[8 + length :]

    def decode(out: Path) -> None:
        if path.is_file() and path.stat().st_size < 1 << 20:
            decode_shard_header(path.read_bytes())

    return _run_on(path, change, _verify, decode)


def prepare_manifest_bytes(directory: Path) -> Run:
    path = make_data_set(directory) / MANIFEST_NAME
    return _run_on(path, mutated_bytes, _verify, _look)


def prepare_write_ahead_log(directory: Path) -> Run:
    """A damaged write-ahead log beside a sound manifest, and the reverse."""
    out = make_data_set(directory)
    path = out / MANIFEST_NAME
    log = path.with_name(path.name + "-wal")
    sound = {}
    connection = sqlite3.connect(path)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        with connection:
            connection.execute("UPDATE prompts SET attempts = attempts + 1")
            recompute_checksums(connection)
        sound = {path: path.read_bytes(), log: log.read_bytes()}
    finally:
        connection.close()

    def run(chance: random.Random) -> None:
        for file in (path, log):
            remove(file)
            file.write_bytes(sound[file])
        remove(path.with_name(path.name + "-shm"))
        damaged = log if chance.random() < 0.8 else path
        _place(damaged, mutated_bytes(sound[damaged], chance, [sound[path]]), chance)
        _verify(out)
        _look(out)

    return run


def prepare_manifest_values(directory: Path) -> Run:
    """Values that no writer wrote, behind the back of SQLite's own checks."""
    out = make_data_set(directory)
    path = out / MANIFEST_NAME
    loose = path.with_name("loose.sqlite")
    shutil.copy(path, loose)
    connection = sqlite3.connect(loose)
    tables = {
        str(name): [str(column[1]) for column in connection.execute(f"PRAGMA table_info({name})")]
        for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")
        if not name.startswith(("sqlite_", "_"))
    }
    schema = dict(connection.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'table'"))
    version = connection.execute("PRAGMA schema_version").fetchone()[0]
    connection.execute("PRAGMA writable_schema = ON")
    with connection:
        for name in tables:
            loose_sql = re.sub("(INTEGER|TEXT) NOT NULL", r"\1", schema[name])
            sql = loose_sql.replace("STRICT", "").rstrip().rstrip(",")
            connection.execute("UPDATE sqlite_schema SET sql = ? WHERE name = ?", (sql, name))
        connection.execute(f"PRAGMA schema_version = {version + 1}")
    connection.close()
    master = loose.read_bytes()
    loose.unlink()

    def run(chance: random.Random) -> None:
        path.write_bytes(master)
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA ignore_check_constraints = ON")
        with connection:
            for _ in range(chance.choice((1, 1, 2))):
                _plant(connection, tables, chance)
            if chance.random() < 0.8:
                recompute_checksums(connection)
        connection.execute("PRAGMA writable_schema = ON")
        with connection:
            for name in tables:
                connection.execute(
                    "UPDATE sqlite_schema SET sql = ? WHERE name = ?", (schema[name], name)
                )
        connection.close()
        _verify(out)
        _look(out)

    return run


def _plant(
    connection: sqlite3.Connection, tables: dict[str, list[str]], chance: random.Random
) -> None:
    table = chance.choice(list(tables))
    column = chance.choice(tables[table])
    values = connection.execute(f"SELECT {column} FROM {table} ORDER BY 1").fetchall()
    value: Any = chance.choice((*ODD, b"\xff\xfe", b"A" * 70_000, float("inf"), "[" * 2000))
    if isinstance(value, Raw):
        value = value.text
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        value = float(value)
    if isinstance(value, list | dict):
        value = orjson.dumps(value).decode()
    before = chance.choice(values)[0] if values else None
    # Values that the encoding of Python's own strings or a UNIQUE index refuses stay as they are.
    with suppress(sqlite3.IntegrityError, UnicodeEncodeError):
        connection.execute(f"UPDATE {table} SET {column} = ? WHERE {column} IS ?", (value, before))


def _look(out: Path) -> None:
    with suppress(ExtractorError, ManifestError):
        look_at(out)


TARGETS = [
    Target(name="dataset.json", count=500, prepare=prepare_provenance),
    Target(name="live", count=1200, prepare=prepare_live),
    Target(name="lock", count=800, prepare=prepare_lock),
    Target(name="shard", count=600, prepare=prepare_shard),
    Target(name="manifest", count=400, prepare=prepare_manifest_bytes),
    Target(name="wal", count=300, prepare=prepare_write_ahead_log),
    Target(name="values", count=600, prepare=prepare_manifest_values),
]

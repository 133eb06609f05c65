"""Damages the files of a data set at random, from a seed, and reads the content of a data set.

To run it with other seeds: `PYTHONPATH=tests python -m hostile.damage verify FIRST COUNT`, or with
`repair` or `run` instead of `verify`.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sqlite3
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from helpers import Notes, make_prompts, options_for

from extractor.core.counters import Counters, Moment, ServerNow
from extractor.core.errors import ExtractorError
from extractor.core.locations import MANIFEST_NAME
from extractor.core.row_policy import OnDuplicate, OnTooLong, Policy
from extractor.core.run_options import RunOptions
from extractor.pipeline.run import run
from extractor.status.live_file import LIVE_NAME
from extractor.status.overview import failed_table, read_status
from extractor.status.page import line, page
from extractor.status.report import session_document
from extractor.status.watcher import Watcher
from extractor.testing.fake_server import FakeServer
from extractor.verify.audit import audit
from extractor.verify.findings import Audit
from extractor.verify.repair import Repair, audit_and_repair
from manifest.decoding import IDENTITY, PROMPT_COLUMNS, SOURCES, row_checksum
from manifest.exceptions import ManifestError

PROMPTS = make_prompts(25, shortest=10)
POLICY = Policy(on_too_long=OnTooLong.TRUNCATE, on_duplicate=OnDuplicate.SKIP, max_tokens=50)
#: Relative frequency with which each file is damaged.
WEIGHTS = {MANIFEST_NAME: 12, "shards": 4, "dataset.json": 2, LIVE_NAME: 1}


def write_rows(path: Path) -> Path:
    """Write rows with labels; some are cut, duplicates, or invalid."""
    rows = [
        json.dumps({"id": f"row-{n}", "input_ids": row.ids, "loss_mask": row.mask})
        for n, row in enumerate(PROMPTS)
    ]
    rows[5:5] = ["nonsense", rows[3], json.dumps({"id": 7, "text": 3})]
    path.write_text("\n".join(rows) + "\n")
    return path


def options_of(server: FakeServer, prompts: Path, out: Path) -> RunOptions:
    return options_for(server, prompts, out, shard_bytes=50_000, concurrency=1, policy=POLICY)


def make_data_set(directory: Path) -> Path:
    return asyncio.run(make_data_set_async(directory))


async def make_data_set_async(directory: Path) -> Path:
    """Create a finished data set of several shards, and files that a killed session left behind."""
    (directory / "dumps").mkdir()
    async with FakeServer(directory / "dumps").running() as server:
        prompts = write_rows(directory / "p.jsonl")
        await run(options_of(server, prompts, directory / "out"), Notes())
    gone = ServerNow(url="http://a", is_up=True, in_flight=1, request_limit=2, num_prompts=3)
    session = session_document(Counters(now=Moment(servers=(gone,))))
    (directory / "out" / LIVE_NAME).write_bytes(
        orjson.dumps(
            {
                "pid": 2**22 + 1, "pid_start_ticks": 5, "pid_namespace": "pid:[1]",
                "written_at": 0.5, "session": session,
            }
        )
    )  # fmt: skip
    return directory / "out"


def unseal(out: Path) -> None:
    """Bring the last shard into the state in which a killed run leaves it."""
    connection = sqlite3.connect(out / MANIFEST_NAME)
    ((number,),) = connection.execute("SELECT MAX(number) FROM shards").fetchall()
    with connection:
        connection.execute(
            "UPDATE shards SET is_sealed = 0, digest = NULL WHERE number = ?", (number,)
        )
    connection.close()
    sealed = out / "shards" / f"shard-{number:06d}.safetensors"
    sealed.rename(out / "shards" / f".{sealed.stem}.open")


def recompute_checksums(connection: sqlite3.Connection) -> None:
    """Give every row the checksum of its current columns, if they have one."""

    def text_or_bytes(data: bytes) -> str | bytes:
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data

    connection.text_factory = text_or_bytes
    for table, names, key in (
        ("prompts", PROMPT_COLUMNS, "ordinal"),
        ("sources", SOURCES, "number"),
        ("identity", IDENTITY, "name"),
    ):
        for values in connection.execute(f"SELECT {', '.join(names)} FROM {table}").fetchall():
            with suppress(TypeError):
                connection.execute(
                    f"UPDATE {table} SET checksum = ? WHERE {key} IS ?",
                    (row_checksum(names, values), values[list(names).index(key)]),
                )


def content(out: Path) -> dict[str, Any]:
    """The content of a data set, independent of its bytes. Raises if it cannot be read."""
    connection = sqlite3.connect(f"file:{out / MANIFEST_NAME}?mode=ro", uri=True)
    try:
        tables = {
            name: sorted(connection.execute(f"SELECT * FROM {name}").fetchall(), key=repr)
            for name in (
                "canaries",
                "identity",
                "prompts",
                "server_starts",
                "shards",
                "sources",
                "tallies",
            )
        }
        tables["columns"] = [
            row[1] for row in connection.execute("PRAGMA table_info(prompts)").fetchall()
        ]
        tables["migrations"] = connection.execute(
            "SELECT migration_set, name FROM _sqlite_migrations ORDER BY id"
        ).fetchall()
    finally:
        connection.close()
    document = json.loads((out / "dataset.json").read_bytes())
    shards = {path.name: path.read_bytes() for path in (out / "shards").iterdir()}
    return {**tables, "dataset.json": document, "shards": shards}


@dataclass(frozen=True)
class Damaged:
    """A damaged file; `mend` restores the original."""

    path: Path
    kind: str
    before: bytes

    def mend(self) -> None:
        self.path.write_bytes(self.before)
        for suffix in ("-wal", "-shm", "-journal"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)

    def __str__(self) -> str:
        return f"{self.kind} in {self.path.name}"


def damage(out: Path, seed: int) -> Damaged:
    """Damage one file of a data set."""
    chance = random.Random(seed)
    (name,) = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))
    path = out / name
    if path.is_dir():
        path = chance.choice(sorted(path.iterdir()))
    before = path.read_bytes()
    data = bytearray(before)
    # Usually a bit: the smallest damage is the hardest to detect.
    (kind,) = chance.choices(["bit", "byte", "cut", "zeros", "swap", "copy"], [12, 4, 1, 1, 1, 1])
    at = chance.randrange(len(data))
    page = 4096
    first, second = (chance.randrange(-(-len(data) // page)) * page for _ in range(2))
    match kind:
        case "bit":
            data[at] ^= 1 << chance.randrange(8)
        case "byte":
            data[at] = chance.randrange(256)
        case "cut":
            del data[max(1, at) :]
        case "zeros":
            data[first : first + page] = bytes(len(data[first : first + page]))
        case "swap" | "copy":
            one, other = bytes(data[first : first + page]), bytes(data[second : second + page])
            if len(one) == len(other):
                data[first : first + page] = other
                if kind == "swap":
                    data[second : second + page] = one
    path.write_bytes(data)
    return Damaged(path=path, kind=f"{kind} (seed {seed}, byte {at}, pages {first} {second})",
                   before=before)  # fmt: skip


def verdict_on(out: Path, seed: int, sound: dict[str, Any] | None) -> tuple[Damaged, Audit]:
    """Damage a data set, verify it, and mend it.

    Raises AssertionError if it is called clean although its content differs from `sound`.
    """
    damaged = damage(out, seed)
    try:
        found = audit(out)
        orjson.dumps(found.to_document())
        found.to_text().encode()
        if found.is_clean:
            assert sound is not None, f"{damaged}: unfinished, and called clean"
            assert content(out) == sound, f"{damaged}: called clean"
        with suppress(ExtractorError, ManifestError):
            look_at(out)
        return damaged, found
    finally:
        damaged.mend()


def look_at(out: Path) -> None:
    """Read what `extractor status` shows."""
    status = read_status(out)
    orjson.dumps(status.to_document())
    failed_table(status)
    look = Watcher(out).look()
    line(look)
    page(look)


async def go_on(out: Path, seed: int, server: FakeServer, prompts: Path) -> None:
    """Damage a data set and run again without a repair: every error must be a known one."""
    damage(out, seed)
    try:
        await run(options_of(server, prompts, out), Notes())
    except* (ExtractorError, ManifestError):
        pass


async def repair_and_go_on(
    out: Path, seed: int, server: FakeServer, prompts: Path, sound: dict[str, Any]
) -> tuple[Damaged, Repair]:
    """Damage a data set, repair it and run again.

    Raises AssertionError unless its content is the same as before, or the repair was refused and
    changed nothing.
    """
    damaged = damage(out, seed)
    after = damaged.path.read_bytes()
    _, repair = audit_and_repair(out)
    if repair.refused is not None:
        if damaged.path.name != MANIFEST_NAME:
            raise AssertionError(f"{damaged}: refused")
        left = damaged.path.read_bytes()
        # SQLite's own header holds the journal mode and a change counter.
        assert (left[100:], len(left)) == (after[100:], len(after)), f"{damaged}: refused, changed"
        return damaged, repair
    await run(options_of(server, prompts, out), Notes())
    found = audit(out)
    assert found.is_clean, f"{damaged}: {repair} {found.to_text()}"
    now = content(out)
    for name in ("identity", "sources", "dataset.json"):
        assert now[name] == sound[name], f"{damaged}: {name}"
    assert without_place(now) == without_place(sound), f"{damaged}: rows"
    return damaged, repair


def without_place(found: dict[str, Any]) -> list[tuple[Any, ...]]:
    """The rows without the place of each sample and its number of attempts."""
    hidden = {"shard", "offset", "checksum", "attempts"}
    places = [n for n, name in enumerate(found["columns"]) if name not in hidden]
    return [tuple(row[n] for n in places) for row in found["prompts"]]


def main(first: int, count: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        out = make_data_set(Path(directory))
        assert audit(out).is_clean, audit(out).to_text()
        sound = content(out)
        for seed in range(first, first + count):
            try:
                verdict_on(out, seed, sound)
            except Exception as error:
                print(f"seed {seed}: {error!r:.600}", flush=True)


async def main_run(first: int, count: int, *, with_repair: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        master = await make_data_set_async(base)
        sound = content(master)
        refused = 0
        async with FakeServer(base / "dumps").running() as server:
            for seed in range(first, first + count):
                out = Path(shutil.copytree(master, base / "copy"))
                try:
                    if with_repair:
                        _, repair = await repair_and_go_on(
                            out, seed, server, base / "p.jsonl", sound
                        )
                        refused += repair.refused is not None
                    else:
                        await go_on(out, seed, server, base / "p.jsonl")
                except (Exception, BaseExceptionGroup) as error:
                    print(f"seed {seed}: {error!r:.900}", flush=True)
                shutil.rmtree(out)
        print(f"{count} runs, {refused} repairs refused")


if __name__ == "__main__":
    command, *numbers = sys.argv[1:]
    first, count = map(int, numbers)
    if command == "verify":
        main(first, count)
    else:
        asyncio.run(main_run(first, count, with_repair=command == "repair"))

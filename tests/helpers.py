"""Prompts, runs and data sets for tests; reads shards by itself, so that a wrong writer is not
checked by its own reader."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import safetensors
import xxhash

from extractor.core.counters import Counters
from extractor.core.events import Reporter
from extractor.core.identity import Identity
from extractor.core.locations import MANIFEST_NAME
from extractor.core.run_options import Input, RunOptions
from extractor.core.timings import Timings
from extractor.pipeline.run import run as run_of_product
from extractor.pipeline.summary import RunSummary
from extractor.servers.server_facts import facts_of
from extractor.testing.fake_model import fake_states
from extractor.testing.fake_server import FakeServer
from extractor.verify.audit import audit
from manifest.records import Row, ServerStart, StoredRow
from manifest.states import State
from manifest.store import Store
from prompts.types import Prompt, RowOrigin
from server_patch.directory import Directory
from server_patch.dump_format import (
    FORMAT_VERSION,
    Dump,
    DumpHeader,
    Ready,
    StateLayout,
    decode_ready,
    encode_ready,
    read_beginning,
)

_ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4}
#: 16-bit floats are compared as bit patterns.
_NUMPY = {"BF16": "<u2", "F16": "<u2", "F32": "<f4", "I32": "<i4"}

LAYOUT = StateLayout(boundaries=(1, 2, 3), hidden_size=8, dtype="BF16", last_kind="post")


def quick(**groups: dict[str, Any]) -> Timings:
    """Timings for tests: retries, looks and probes without the usual seconds in between.

    `groups`: changes by group, as `health={"gone_after_s": 0.1}`.
    """
    values: dict[str, dict[str, Any]] = {
        "dispatch": {
            "retry_base_s": 0.001, "retry_max_s": 0.01, "death_shows_s": 0.05,
            "return_pause_s": 0.02,
        },
        "health": {"alive_interval_s": 0.02},
        "collect": {"late_dumps_s": 0.2},
    }  # fmt: skip
    for name, changes in groups.items():
        values[name] = {**values.get(name, {}), **changes}
    timings = Timings()
    return replace(
        timings,
        **{name: replace(getattr(timings, name), **changes) for name, changes in values.items()},
    )


async def run(
    options: RunOptions, reporter: Reporter, *, timings: Timings | None = None
) -> RunSummary:
    """`extractor.pipeline.run.run`, quick unless told otherwise."""
    return await run_of_product(options, reporter, timings=timings or quick())


@dataclass
class Notes:
    """A reporter that remembers."""

    messages: list[str] = field(default_factory=list)
    #: Event, level and URL, of what is told of servers.
    of_servers: list[tuple[object, object, object]] = field(default_factory=list)
    num_updates: int = 0
    is_closed: bool = False

    def update(self, counters: Counters) -> None:
        self.num_updates += 1

    def report(self, message: str, **fields: object) -> None:
        self.messages.append(message)
        if "server" in fields:
            self.of_servers.append((fields["event"], fields.get("level", "info"), fields["server"]))

    def close(self) -> None:
        self.is_closed = True


@dataclass(frozen=True)
class Ids:
    """What one row of a prompt file asks for."""

    ids: tuple[int, ...]
    mask: tuple[int, ...]


def make_prompts(
    count: int, *, seed: int = 0, shortest: int = 1, longest: int = 60, vocabulary: int = 1000
) -> list[Ids]:
    """`count` prompts of mixed lengths, the same for the same seed."""
    chance = random.Random(seed)
    prompts = []
    for _ in range(count):
        length = chance.randint(shortest, longest)
        prompts.append(
            Ids(
                ids=tuple(chance.randrange(vocabulary) for _ in range(length)),
                mask=tuple(chance.randrange(2) for _ in range(length)),
            )
        )
    return prompts


def write_prompts(path: Path, prompts: Sequence[Ids]) -> Path:
    path.write_text(
        "".join(json.dumps({"input_ids": row.ids, "loss_mask": row.mask}) + "\n" for row in prompts)
    )
    return path


def options_for(server: FakeServer, prompts: Path, out: Path, **changes: Any) -> RunOptions:
    """A run against a fake server: rows of ids, so no tokenizer."""
    plain = {
        "prompts": (prompts,),
        "out": out,
        "server_urls": (server.url,),
        "dump_root": server.directory.parents[1],
        "tokenizer": "none",
        "concurrency": 8,
        "num_movers": 1,
    }
    return run_options(**{**plain, **changes})


def run_options(**values: Any) -> RunOptions:
    """`RunOptions` by the names that the command's options have."""
    return changed(RunOptions(input=Input(paths=(Path("p"),))), **values)


def changed(options: RunOptions, **values: Any) -> RunOptions:
    """`options` with other values, by the names that the command's options have."""
    short = {"prompts": "paths", "out": "directory", "server_urls": "urls"}
    values = {short.get(name, name): value for name, value in values.items()}
    groups = {}
    for name in ("input", "output", "servers", "load", "patience"):
        group = getattr(options, name)
        inner = {each.name for each in fields(group)} & values.keys()
        groups[name] = replace(group, **{each: values.pop(each) for each in inner})
    return replace(options, **groups, **values)


@dataclass(frozen=True)
class Sample:
    """One stored sample, as read back."""

    ids: tuple[int, ...]
    mask: tuple[int, ...]
    states: dict[str, np.ndarray]
    digest: str  # of its bytes, computed here


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of a file, by the published format alone."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    body = data[8 + length :]
    ends = sorted(entry["data_offsets"][1] for entry in header.values())
    assert not ends or ends[-1] == len(body), f"{path}: bytes that no tensor has"
    return {
        name: np.frombuffer(
            body[slice(*entry["data_offsets"])], dtype=_NUMPY[entry["dtype"]]
        ).reshape(entry["shape"])
        for name, entry in header.items()
    }


class LibraryTensor(TypedDict):
    """A tensor as the safetensors library gives it."""

    dtype: str
    shape: list[int]
    data: bytearray


#: The library's own reader, which comes without annotations: the bytes of a file -> its tensors.
deserialize: Callable[[bytes], list[tuple[str, LibraryTensor]]] = safetensors.deserialize


def read_samples(out: Path) -> dict[int, Sample]:
    """Every sample of a data set by ordinal, from its sealed shards alone."""
    tensors: dict[int, dict[str, np.ndarray]] = {}
    for path in sorted((out / "shards").glob("shard-*.safetensors")):
        for name, values in read_safetensors(path).items():
            number, _, tensor = name.partition(".")
            assert tensor not in tensors.setdefault(int(number), {}), f"{name} is there twice"
            tensors[int(number)][tensor] = values
    return {ordinal: _sample(parts) for ordinal, parts in sorted(tensors.items())}


def _sample(parts: dict[str, np.ndarray]) -> Sample:
    digest = xxhash.xxh3_128()
    for values in parts.values():
        digest.update(values.tobytes())
    ids, mask = parts.pop("input_ids"), parts.pop("loss_mask")
    return Sample(
        ids=tuple(ids.tolist()), mask=tuple(mask.tolist()), states=parts, digest=digest.hexdigest()
    )


def rows_of(out: Path) -> list[Row]:
    store = Store.open_read_only(out / MANIFEST_NAME)
    try:
        return list(store.rows())
    finally:
        store.close()


def stored_rows(out: Path) -> list[StoredRow]:
    """The stored rows, by ordinal."""
    store = Store.open_read_only(out / MANIFEST_NAME)
    try:
        rows = [row for shard in store.shards() for row in store.shard_rows(shard.number)]
    finally:
        store.close()
    return sorted(rows, key=lambda row: row.ordinal)


def servers_of(out: Path) -> dict[int, int | None]:
    """The number of the server start that computed each stored row, by ordinal."""
    return {row.ordinal: row.sample.server for row in stored_rows(out)}


def stored_ordinals(out: Path) -> set[int]:
    return {row.ordinal for row in rows_of(out) if row.state is State.STORED}


def assert_whole(
    out: Path, prompts: Sequence[Ids], *, layout: StateLayout = LAYOUT, without: Iterable[int] = ()
) -> None:
    """`out` holds exactly `prompts`, each with its own states, and verify has nothing to say."""
    samples = read_samples(out)
    assert set(samples) == set(range(len(prompts))) - set(without)
    for ordinal, sample in samples.items():
        assert sample.ids == prompts[ordinal].ids, ordinal
        assert sample.mask == prompts[ordinal].mask, ordinal
        expected = fake_states(np.array(sample.ids, dtype=np.int32), layout)
        assert list(sample.states) == list(expected)
        for name, values in expected.items():
            assert np.array_equal(sample.states[name], values), (ordinal, name)
    assert [finding for finding in audit(out).findings.all] == []


def dumps_under(root: Path) -> list[str]:
    """Everything under a dump root but what writers tell of themselves."""
    return sorted(
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.suffix and not any(name in path.name for name in ("READY", "STATS"))
    )


def read_header(path: Path) -> Dump:
    """The header of a dump. Raises OSError, DumpFormatError."""
    with Directory.open(path.parent) as directory:
        return read_beginning(directory, path.name)[0]


def ordinals_sent(rids: Iterable[str]) -> list[int]:
    """The prompts that requests were about; probes are left out."""
    parts = [rid.split("-") for rid in rids]
    return [int(ordinal) for _, _, session, ordinal, _ in parts if "probe" not in session]


# --- values -----------------------------------------------------------------------------------


def prompt_of(row: Ids, *, ordinal: int = 0) -> Prompt:
    return Prompt(
        ordinal=ordinal,
        origin=RowOrigin(source="prompts.jsonl", line=ordinal + 1),
        label=None,
        input_ids=np.array(row.ids, dtype=np.int32),
        loss_mask=np.array(row.mask, dtype=np.uint8),
    )


def make_identity(**changes: Any) -> Identity:
    values: dict[str, Any] = {
        "model": "fake/model",
        "architecture": "FakeForCausalLM",
        "config_digest": "fake",
        "vocab_size": 1000,
        "num_layers": 4,
        "hidden_size": 8,
        "dtype": "BF16",
        "boundaries": (1, 2, 3),
        "last_kind": "post",
        "quantization": None,
        "tokenizer_digest": "t",
        "template_digest": "u",
        "reading": {"thinking": "template"},
        "inputs": ("i",),
        **changes,
    }
    lists = {name: list(value) for name, value in values.items() if isinstance(value, tuple)}
    return Identity.from_document(values | lists)


def make_start(
    number: int, *, session: int = 0, accepted: tuple[str, ...] = (), **facts: Any
) -> ServerStart:
    """A recorded server start; `facts` are fields of its READY.json."""
    return ServerStart(
        number=number,
        session=session,
        used_at="1970-01-01T00:00:00+00:00",
        url="http://127.0.0.1:30000",
        boot_id=f"boot-{number}",
        facts=facts_of(make_ready(**facts)),
        canary_error=None,
        accepted=accepted,
    )


def make_header(**changes: Any) -> DumpHeader:
    values: dict[str, Any] = {
        "rid": "xtr-run-session-0-1",
        "start": 0,
        "rows": 3,
        "boot_id": "boot",
        "rank": 0,
        "counter": 7,
    }
    layout: dict[str, Any] = {
        "boundaries": (1, 2, 3),
        "hidden_size": 8,
        "dtype": "BF16",
        "last_kind": "post",
    }
    layout |= {name: changes.pop(name) for name in layout if name in changes}
    return DumpHeader(**{**values, **changes}, layout=StateLayout(**layout))


def make_ready(**changes: Any) -> Ready:
    """`changes` are keys of READY.json."""
    document: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "boot_id": "boot",
        "rank": 0,
        "pid": 1,
        "pid_start_ticks": 1,
        "started_at": "1970-01-01T00:00:00+00:00",
        "plugin_version": "0",
        "engine_version": "0.5.11",
        "host": "127.0.0.1",
        "port": 30000,
        "model_path": "fake/model",
        "architecture": "FakeForCausalLM",
        "config_digest": "fake",
        "vocab_size": 1000,
        "num_layers": 4,
        "hidden_size": 8,
        "dtype": "BF16",
        "boundaries": (1, 2, 3),
        "last_kind": "post",
        "capture_method": "fake",
        "tp_size": 1,
        "dp_size": 1,
        "rid_prefix": "xtr-",
        "chunked_prefill_size": -1,
        "radix_cache": False,
        "ring_bytes": 0,
        "num_writers": 1,
    }
    return decode_ready(json.dumps({**document, **changes}).encode())


def change_ready(ready: Ready, **changes: Any) -> Ready:
    """`ready` with other values for some keys of READY.json."""
    return decode_ready(json.dumps({**json.loads(encode_ready(ready)), **changes}).encode())

"""Files under the dump root: dumps, error records, READY.json, FAILED.json."""

from __future__ import annotations

import json
import os
import random
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
from helpers import Ids, make_header, make_ready, prompt_of

from extractor.core.locations import DumpRoot
from extractor.dumps.correlator import Piece
from extractor.dumps.discovery import ranks_of, scan_writers
from extractor.dumps.dump_piece import SampleFault, check_tokens, opened
from extractor.dumps.dump_reader import DumpFile, DumpWatcher, Rank
from extractor.servers import server_facts
from extractor.servers.cleanup import find_leftovers, find_waiting
from extractor.servers.client import ServerFacts
from extractor.servers.target import Target as ServerTarget
from extractor.servers.target import check_compatible
from extractor.system.process_id import pid_namespace, process_start_ticks
from extractor.testing.fake_model import fake_states
from fuzz.mutation import KINDS, mutated_bytes, mutated_json, put, remove
from fuzz.target import Run, Target
from server_patch.directory import Directory
from server_patch.dump_format import (
    FAILED_NAME,
    READY_NAME,
    DumpHeader,
    ErrorRecord,
    dump_name,
    encode_error,
    encode_header,
    encode_ready,
    error_name,
)

PROMPT = prompt_of(Ids(ids=(5, 6, 7), mask=(0, 1, 1)))
FACTS = ServerFacts(
    model_path="fake/model",
    tokenizer_path="fake/model",
    context_length=512,
    max_input_tokens=506,
    max_requests=None,
    version="0.5.11",
)
URL = "http://127.0.0.1:30000"


def _dump(header: DumpHeader) -> bytes:
    ids = np.resize(PROMPT.input_ids, header.rows)
    states = fake_states(ids, header.layout)
    return encode_header(header) + b"".join(map(np.ndarray.tobytes, states.values())) + bytes(ids)


def _own_ready() -> bytes:
    """READY.json of a live server: this process."""
    return encode_ready(
        make_ready(
            pid=os.getpid(),
            pid_start_ticks=process_start_ticks(os.getpid()),
            pid_namespace=pid_namespace(),
            settings={"attention_backend": "triton", "device": "cuda"},
        )
    )


def _rank_directory(directory: Path) -> Path:
    rank = directory / "boot" / "0"
    rank.mkdir(parents=True)
    (rank / READY_NAME).write_bytes(_own_ready())
    return rank


def _place(path: Path, data: bytes, chance: random.Random) -> None:
    """Write an input; or, now and then, put something else in its place."""
    remove(path)
    if chance.random() < 0.04:
        put(path, chance.choice(KINDS))
    else:
        path.write_bytes(data)


def _changed_header(data: bytes, chance: random.Random) -> bytes:
    """A dump with another header, whose length mostly fits."""
    (length,) = struct.unpack_from("<Q", data)
    header = mutated_json(data[8 : 8 + length], chance)
    stated = chance.choice((0, 2**63, len(header) + 1)) if chance.random() < 0.1 else len(header)
    return struct.pack("<Q", stated) + header + data[8 + length :]


def prepare_dumps(directory: Path) -> Run:
    root, rank_directory = DumpRoot(path=directory), _rank_directory(directory)
    path = rank_directory / dump_name(7)
    sound = [
        _dump(make_header(last_kind=kind, dtype=dtype))
        for kind in ("post", "both")
        for dtype in ("BF16", "F32")
    ]

    def run(chance: random.Random) -> None:
        data = chance.choice(sound)
        if chance.random() < 0.5:
            data = _changed_header(data, chance)
        else:
            data = mutated_bytes(data, chance, sound)
        _place(path, data, chance)
        (rank,) = scan_writers(root).alive
        watcher = DumpWatcher([rank], whole_bytes=chance.choice((0, 1 << 16)))
        for _, arrival in watcher.poll():
            if isinstance(arrival, DumpFile):
                header = arrival.dump.header
                piece = Piece(start=header.start, rows=header.rows, handle=arrival)
                with suppress(SampleFault), opened(piece) as source:
                    check_tokens(source, PROMPT, piece)
        find_waiting(root)

    return run


def prepare_errors(directory: Path) -> Run:
    rank_directory = _rank_directory(directory)
    path = rank_directory / error_name(7)
    record = ErrorRecord(rid="xtr-run-session-0-1", start=0, reason="no space left on device")
    sound = encode_error(record)
    rank = Rank(directory=Directory.open(rank_directory), ready=make_ready())

    def run(chance: random.Random) -> None:
        change = mutated_json if chance.random() < 0.7 else mutated_bytes
        _place(path, change(sound, chance), chance)
        DumpWatcher([rank], rid_prefix="xtr-run-session").poll()

    return run


def prepare_ready(directory: Path) -> Run:
    root, rank_directory = DumpRoot(path=directory), _rank_directory(directory)
    other = directory / "other" / "0"
    other.mkdir(parents=True)
    (other / READY_NAME).write_bytes(encode_ready(make_ready(boot_id="other", port=30001)))
    path, sound = rank_directory / READY_NAME, _own_ready()

    def run(chance: random.Random) -> None:
        change = mutated_json if chance.random() < 0.8 else mutated_bytes
        _place(path, change(sound, chance), chance)
        writers = scan_writers(root)
        for leftover in find_leftovers(root):
            str(leftover)
        for rank in writers.alive:
            found = ranks_of(writers, url=URL, model_path="fake/model")
            target = ServerTarget.of(URL, FACTS, found)
            check_compatible(target, target)
            facts = json.loads(json.dumps(server_facts.facts_of(rank.ready)))
            server_facts.differences(facts, server_facts.facts_of(make_ready()))

    return run


def prepare_failed(directory: Path) -> Run:
    root, rank_directory = DumpRoot(path=directory), _rank_directory(directory)
    (rank_directory / READY_NAME).unlink()
    path = rank_directory / FAILED_NAME
    sound = json.dumps({"reason": "no such layer", "pid": os.getpid()}).encode()

    def run(chance: random.Random) -> None:
        change = mutated_json if chance.random() < 0.8 else mutated_bytes
        _place(path, change(sound, chance), chance)
        scan_writers(root)
        find_leftovers(root)

    return run


TARGETS = [
    Target(name="dump", count=2000, prepare=prepare_dumps),
    Target(name="error", count=700, prepare=prepare_errors),
    Target(name="ready", count=1800, prepare=prepare_ready),
    Target(name="failed", count=500, prepare=prepare_failed),
]

"""A server with the plugin, its requests, and its dumps."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from helpers import read_header
from rig.server import cpu_server

from server_patch.dump_format import (
    READY_NAME,
    DumpHeader,
    ErrorRecord,
    Ready,
    decode_error,
    decode_ready,
    is_dump_name,
    is_error_name,
)

_NUMPY = {"F32": np.float32, "I32": np.int32}


@dataclass(frozen=True, kw_only=True)
class Dump:
    """One dump file, read."""

    header: DumpHeader
    tensors: Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Serving:
    """A running server and the place where it dumps."""

    url: str
    log_path: Path
    root: Path

    @property
    def directories(self) -> list[Path]:
        """One per writer."""
        return sorted(self.root.glob("*/*"))

    @property
    def directory(self) -> Path:
        """That of the one writer."""
        (directory,) = self.directories
        return directory

    def readies(self) -> list[Ready]:
        return [decode_ready((path / READY_NAME).read_bytes()) for path in self.directories]

    def generate(self, rid: str, ids: Sequence[int], **extra: Any) -> dict[str, Any]:
        """One request, as the client sends it unless `extra` says otherwise."""
        body = {
            "rid": rid,
            "input_ids": list(ids),
            "extra_key": rid,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            **extra,
        }
        request = urllib.request.Request(
            f"{self.url}/generate",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            answer: dict[str, Any] = json.load(reply)
        return answer

    def generate_all(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """All at once."""
        with ThreadPoolExecutor(max_workers=len(requests)) as pool:
            futures = [pool.submit(self.generate, **request) for request in requests]
            return [future.result() for future in futures]

    def take_sample(self, rid: str, rows: int) -> dict[str, np.ndarray]:
        """The whole states of `rid`, put together from its dumps, which are removed.

        Waits for them: a request is answered before its last dump is written.
        """
        until = time.monotonic() + 20
        while True:
            dumps = [(path, dump) for path, dump in self.dumps() if dump.header.rid == rid]
            if sum(dump.header.rows for _, dump in dumps) >= rows:
                break
            problems = [record for record in self.errors() if record.rid == rid]
            if problems or time.monotonic() > until:
                raise AssertionError(f"{rid}: {[d.header for _, d in dumps]}, errors {problems}")
            time.sleep(0.02)
        for path, _ in dumps:
            path.unlink()
        pieces = sorted((dump for _, dump in dumps), key=lambda dump: dump.header.start)
        at = 0
        for piece in pieces:
            assert piece.header.start == at, f"{rid}: pieces do not tile: {pieces}"
            at += piece.header.rows
        assert at == rows, f"{rid}: {at} rows, {rows} expected"
        return {
            name: np.concatenate([piece.tensors[name] for piece in pieces])
            for name in pieces[0].tensors
        }

    def dumps(self) -> Iterator[tuple[Path, Dump]]:
        for path in self._files():
            if is_dump_name(path.name):
                yield path, read_dump(path)

    def errors(self) -> list[ErrorRecord]:
        return [
            decode_error(path.read_bytes()) for path in self._files() if is_error_name(path.name)
        ]

    def _files(self) -> list[Path]:
        return [path for directory in self.directories for path in sorted(directory.iterdir())]


def update_weights(server: Serving, model: Path, **extra: Any) -> dict[str, Any]:
    """Make the server load the weights of `model` into its model, and return its reply."""
    request = urllib.request.Request(
        f"{server.url}/update_weights_from_disk",
        data=json.dumps({"model_path": str(model), **extra}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        answer: dict[str, Any] = json.load(reply)
    return answer


def read_dump(path: Path) -> Dump:
    found = read_header(path)
    data = path.read_bytes()
    tensors = {
        name: np.frombuffer(data[span.begin : span.end], dtype=_NUMPY[span.dtype]).reshape(
            span.shape
        )
        for name, span in found.tensors.items()
    }
    return Dump(header=found.header, tensors=tensors)


def wait_for(condition: Callable[[], object], timeout_s: float = 30) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "timed out"
        time.sleep(0.02)


@contextmanager
def serve(
    model: Path,
    dump_root: Path,
    *,
    boundaries: str,
    last: str = "post",
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    plugin: bool = True,
    log_path: Path | None = None,
) -> Iterator[Serving]:
    """Start a server that dumps under `dump_root`; its log is beside that by default."""
    settings = {
        "SGLANG_HS_BOUNDARIES": boundaries,
        "SGLANG_HS_LAST": last,
        # Operators this small are over before a second thread has joined in, and on a busy machine
        # the threads of a team wait for each other a hundred times as long as they work.
        "OMP_NUM_THREADS": "1",
        **(env or {}),
    }
    with cpu_server(
        model,
        dump_dir=dump_root if plugin else None,
        extra_args=args,
        env=settings,
        plugin=plugin,
        log_path=log_path or dump_root.with_suffix(".log"),
    ) as server:
        yield Serving(url=server.url, log_path=server.log_path, root=dump_root)

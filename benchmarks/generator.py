"""A server that computes nothing: publishes real dumps as fast as /dev/shm takes them.

    python -m benchmarks.generator --dump-root /dev/shm/x --port 30000 --hidden-size 2048

For measuring the client alone. Headers, ids and counters are those of a real server; the states are
the same finite numbers in every dump, for computing them would cost more than writing them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.command import command_parser, number_from, run_command
from extractor.testing.fake_model import FakeModel
from extractor.testing.fake_server import FakeServer
from extractor.testing.faults import Fault
from server_patch.directory import Buffer
from server_patch.dump_format import DumpHeader, StateLayout, dump_name, encode_header

VOCAB_SIZE = 32_000
CONTEXT_LENGTH = 131_072
#: As many as the plugin has; a thread serves as well as a process where there is no model.
NUM_WRITERS = 4
#: Smaller dumps are written where they are made: a thread's turn would cost more.
INLINE_BYTES = 1 << 20


class Generator(FakeServer):
    """A fake server whose dumps cost their bytes and no more."""

    def __init__(self, dump_root: Path, *, layout: StateLayout) -> None:
        super().__init__(
            dump_root,
            model=FakeModel(layout=layout, vocab_size=VOCAB_SIZE, context_length=CONTEXT_LENGTH),
        )
        self.min_delay_s = 0.0
        self._states = memoryview(b"")
        self._writers = ThreadPoolExecutor(NUM_WRITERS, thread_name_prefix="writer")

    def dump(self, rid: str, ids: npt.NDArray[np.int32], fault: Fault | None = None) -> None:
        """One piece, written as the plugin's writers do."""
        layout = self.model.layout
        counter = next(self._counter)
        header = DumpHeader(
            rid=rid,
            start=0,
            rows=len(ids),
            layout=layout,
            boot_id=self.boot_id,
            rank=0,
            counter=counter,
            weights=self.model.weights,
        )
        row_bytes = 2 * sum(layout.state_width(name) for name in layout.state_names)
        size = len(ids) * row_bytes
        if len(self._states) < size:
            # Finite bfloat16 of both signs; what they are makes no difference to anyone.
            bits = np.random.default_rng(0).integers(0x3C00, 0x4000, size // 2, dtype=np.uint16)
            self._states = memoryview(bits.tobytes())
        parts: list[Buffer] = [
            encode_header(header),
            self._states[:size],
            ids.astype("<i4").tobytes(),
        ]
        assert self.rank_dir is not None  # it has announced itself
        if size < INLINE_BYTES:
            self.rank_dir.write(dump_name(counter), parts)
        else:
            self._writers.submit(self.rank_dir.write, dump_name(counter), parts).add_done_callback(
                _require_written
            )


def _require_written(done: Future[int]) -> None:
    if done.exception() is not None:
        print(f"a dump could not be written: {done.exception()}", file=sys.stderr, flush=True)
        os._exit(1)  # whoever measures must not wait for it


async def serve(options: argparse.Namespace) -> None:
    layout = StateLayout(
        boundaries=tuple(range(1, options.num_boundaries + 1)),
        hidden_size=options.hidden_size,
        dtype="BF16",
        last_kind="post",
    )
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = Generator(options.dump_root, layout=layout)
    async with server.running(port=options.port):
        print(server.url, flush=True)
        await stop.wait()


def main() -> None:
    parser = command_parser(__doc__, __file__)
    parser.add_argument("--dump-root", type=Path, required=True, help="where it dumps; on tmpfs")
    parser.add_argument("--port", type=int, default=0, help="of 127.0.0.1; 0: a free one")
    parser.add_argument("--hidden-size", type=number_from(1), default=2048, help="of a state")
    parser.add_argument(
        "--num-boundaries", type=number_from(1), default=3, help="states beside the last"
    )
    options = parser.parse_args()
    os.umask(0o077)
    asyncio.run(serve(options))


if __name__ == "__main__":
    run_command(main)

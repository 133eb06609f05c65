"""Rows tokenised in processes of their own: in order, bounded, away from our own interpreter.

A tokenizer takes about a microsecond a token and a template's rendering some more; the process
that feeds a server has better things to do with its one interpreter.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection, wait
from typing import Final

from prompts.inputs import RawRow
from prompts.reading_options import ReadingOptions
from prompts.render import Renderer
from prompts.token_bound import TokenBound
from prompts.types import BadRow, Prompt, TokenizerError

#: What one process gets at a time: enough to make the passing of it cheap, little enough to share.
BATCH_ROWS: Final = 64
BATCH_BYTES: Final = 1 << 18
#: Batches for each process that are sent and not taken back yet.
BATCHES_AHEAD: Final = 3

Batch = list[RawRow]
Results = list[Prompt | BadRow]


class RendererPool:
    """`num_workers` processes that each load the tokenizer once."""

    def __init__(
        self, renderer: Renderer, *, num_workers: int, batch_rows: int = BATCH_ROWS
    ) -> None:
        """`renderer`: the one of this process. The worker processes start with the first rows, and
        fail if they load another tokenizer or chat template. `batch_rows`: maximum rows of a batch.
        """
        assert renderer.source is not None
        self.num_workers = num_workers
        self._batch_rows = batch_rows
        self._is_closed = False
        # Not by fork: this process has threads, and so have the libraries that it uses.
        context = multiprocessing.get_context("spawn")
        # They end when we let go of our end: at once, as they hold nothing that could be lost.
        self._theirs, self._ours = context.Pipe(duplex=False)
        self._executor = ProcessPoolExecutor(
            num_workers,
            mp_context=context,
            initializer=_begin,
            initargs=(
                renderer.source,
                renderer.options,
                renderer.bound,
                _digests(renderer),
                self._theirs,
            ),
        )

    def __enter__(self) -> RendererPool:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed = True
        self._ours.close()
        self._theirs.close()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def prompts_from(self, rows: Iterable[RawRow]) -> Iterator[Prompt | BadRow]:
        """Yield the result of `Renderer.prompt_from` for each row, in order.

        At most `BATCHES_AHEAD` batches for each process are read before the first of them is used.
        Ends early if the pool is closed. Raises `TokenizerError` if a process dies, or loads a
        tokenizer or chat template other than that of this process.
        """
        ahead: deque[Future[Results]] = deque()
        try:
            for batch in _batches(rows, self._batch_rows):
                ahead.append(self._executor.submit(_read, batch))
                if len(ahead) >= BATCHES_AHEAD * self.num_workers:
                    yield from ahead.popleft().result()
            while ahead:
                yield from ahead.popleft().result()
        except (RuntimeError, CancelledError) as exc:
            if self._is_closed:
                return
            if not isinstance(exc, BrokenProcessPool):
                raise
            raise TokenizerError(
                "a process that tokenises ended by itself; is memory short? Run the same command "
                "again, perhaps with fewer --tokenizer-workers (0: none)"
            ) from exc
        finally:
            for future in ahead:
                future.cancel()


def _batches(rows: Iterable[RawRow], max_rows: int) -> Iterator[Batch]:
    batch: Batch = []
    size_bytes = 0
    for row in rows:
        batch.append(row)
        size_bytes += len(row.data)
        if len(batch) == max_rows or size_bytes >= BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


# --- in the worker process --------------------------------------------------------------------

_renderer: Renderer | None = None
_failure: TokenizerError | None = None  # raised for the first rows: a crash would hide the reason


def _begin(
    tokenizer: str,
    options: ReadingOptions,
    bound: TokenBound,
    digests: tuple[str, str],
    alive: Connection,
) -> None:
    global _renderer, _failure
    # A signal for the whole group (Ctrl-C, the end of a service) is for the parent to act on: it
    # drains, and needs us for that.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(
        target=_end_with_parent, args=(alive,), name="parent-watch", daemon=True
    ).start()
    # Each process is one of several already.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        _renderer = Renderer.load(tokenizer, options, bound=bound)
        if _digests(_renderer) != digests:
            raise TokenizerError(
                f"{tokenizer}: the tokenizer or its chat template changed while it was being "
                "loaded. What is stored is sound: restore the old files and run the same command "
                "again"
            )
    except TokenizerError as error:
        _failure = error


def _digests(renderer: Renderer) -> tuple[str, str]:
    return renderer.tokenizer_digest, renderer.template_digest


def _end_with_parent(alive: Connection) -> None:
    # The executor's own pipes tell nothing of a killed parent: we hold both of their ends.
    wait([alive])
    os._exit(1)


def _read(batch: Batch) -> Results:
    if _failure is not None:
        raise _failure
    assert _renderer is not None
    return _renderer.prompts_from(batch)

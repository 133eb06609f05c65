"""Rows rendered and tokenised in worker processes: in order, bounded, within limits.

A chat template is a program and a tokenizer a parser of whatever lies in the model's folder, both
by others; they never run in the client's process. A row on which they take too long, need too much
memory or crash costs a worker process, and is one failed row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from multiprocessing.connection import wait
from threading import Lock
from typing import Final

import numpy as np
import numpy.typing as npt

from prompts.dialects import decode_row, label_of
from prompts.inputs import RawRow
from prompts.reading_options import DEFAULTS, ReadingOptions
from prompts.render import Renderer, with_moment
from prompts.token_bound import NO_BOUND, TokenBound
from prompts.types import BadRow, Prompt, RowError, RowReason, TokenizerError
from prompts.worker_messages import (
    DEFAULT_LIMITS,
    CodeLimits,
    Message,
    RendererFacts,
    check_message,
    item_of,
    load_message,
    rows_message,
)
from prompts.worker_process import WorkerDied, WorkerProcess

#: What one process gets at a time: enough to make the passing of it cheap, little enough to share.
BATCH_ROWS: Final = 64
BATCH_BYTES: Final = 1 << 18
#: Batches for each process that are sent and not taken back yet.
BATCHES_AHEAD: Final = 3

Items = list[Prompt | BadRow]


@dataclass(eq=False)
class _Batch:
    rows: Sequence[RawRow]
    items: Items | None = None  # once they are made
    is_wanted: bool = True  # else, nobody takes the items


@dataclass(eq=False)
class _PoolWorker:
    process: WorkerProcess
    is_loaded: bool = False
    in_work: deque[_Batch] = field(default_factory=deque)  # sent and not answered, in order


class _Closed(Exception):
    """The pool was closed by another thread."""


class RendererPool:
    """Makes prompts of rows in worker processes that each load the tokenizer once.

    Without a tokenizer there are only rows of ids, which need no code of others: these are read in
    this process.
    """

    def __init__(
        self,
        source: str | None,
        options: ReadingOptions = DEFAULTS,
        *,
        bound: TokenBound = NO_BOUND,
        limits: CodeLimits = DEFAULT_LIMITS,
        batch_rows: int = BATCH_ROWS,
    ) -> None:
        """`source`: a local model folder or a hub name; None for rows of ids only.

        `bound`: as in `Renderer`. `batch_rows`: maximum rows of a batch.
        """
        #: Always with a time, so that all processes use the same.
        self.options = with_moment(options)
        self._source = source
        self._limits = limits
        self._batch_rows = batch_rows
        self._plain = Renderer(options=self.options, bound=bound)
        self._facts: RendererFacts | None = None
        self._workers: list[_PoolWorker] = []
        self._num_deaths = 0  # without a success in between
        self._is_closed = False
        self._lock = Lock()  # for the start of processes and their end

    def __enter__(self) -> RendererPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes. Whoever waits for prompts, in another thread, gets no more."""
        with self._lock:
            self._is_closed = True
            for worker in self._workers:
                worker.process.kill()

    def load(self) -> RendererFacts:
        """Load the tokenizer in the first process, once. Raises `TokenizerError`."""
        if self._facts is None and self._source is None:
            plain = self._plain
            self._facts = RendererFacts(
                tokenizer_digest=plain.tokenizer_digest,
                template_digest=plain.template_digest,
                now=plain.now,
            )
        while self._facts is None:
            if not self._workers:
                self._start()
            self._handle_answers(_Queue())
        return self._facts

    def prompts_from(
        self, rows: Iterable[RawRow], *, num_workers: int = 1
    ) -> Generator[Prompt | BadRow]:
        """Yield the result of `Renderer.prompt_from` for each row, in order.

        At most `BATCHES_AHEAD` batches for each of the `num_workers` processes are read before the
        first of them is used. Ends early if the pool is closed. Raises `TokenizerError` if a
        process cannot load the tokenizer, or loads another one than the first process did.
        """
        if self._source is None:
            yield from map(self._plain.prompt_from, rows)
            return
        batches = _batches(rows, self._batch_rows)
        queue = _Queue()
        try:
            self.load()
            while True:
                self._fill(queue, batches, num_workers)
                if not queue.ahead:
                    return
                while (items := queue.ahead[0].items) is None:
                    self._handle_answers(queue)
                    self._fill(queue, batches, num_workers)
                queue.ahead.popleft()
                yield from items
        except _Closed:
            return
        finally:
            for batch in queue.ahead:
                batch.is_wanted = False

    def decode(self, ids: Sequence[npt.NDArray[np.int32]]) -> Sequence[str | None]:
        """The text of each list of tokens, control tokens included; None without a tokenizer.

        Raises `TokenizerError`.
        """
        if self._source is None:
            return [None] * len(ids)
        self.load()
        process = self._workers[0].process
        process.send(("decode", [one.tobytes() for one in ids]))
        try:
            (_, texts) = process.receive()
        except WorkerDied as death:
            raise TokenizerError(f"{self._source}: {death}") from death
        return list(texts)

    # --- worker processes ----------------------------------------------------------------------

    def _start(self) -> None:
        assert self._source is not None
        with self._lock:
            if self._is_closed:
                raise _Closed
            try:
                process = WorkerProcess(self._limits)
            except OSError as error:
                raise TokenizerError(f"no worker process can be started ({error})") from error
            self._workers.append(_PoolWorker(process))
        process.send(load_message(self._source, self.options, self._plain.bound, self._limits))

    def _fill(self, queue: _Queue, batches: Iterator[_Batch], num_workers: int) -> None:
        """Read batches, and send them, the oldest first, to the processes with the least to do."""
        while len(self._workers) < num_workers:
            self._start()
        while len(queue.ahead) < BATCHES_AHEAD * num_workers and (batch := next(batches, None)):
            queue.add(batch)
        while queue.unsent:
            loaded = [worker for worker in self._workers if worker.is_loaded]
            worker = min(loaded, key=lambda one: len(one.in_work), default=None)
            if worker is None or len(worker.in_work) >= BATCHES_AHEAD:
                return
            batch = queue.unsent.popleft()
            worker.in_work.append(batch)
            worker.process.send(rows_message(batch.rows))

    def _handle_answers(self, queue: _Queue) -> None:
        """Wait for answers. Raises `TokenizerError`, _Closed."""
        ready = wait([worker.process.answers for worker in self._workers])
        for worker in list(self._workers):
            if worker.process.answers in ready:
                try:
                    answer = worker.process.receive()
                except WorkerDied as death:
                    if self._is_closed:
                        raise _Closed from death
                    self._replace(worker, queue, str(death))
                else:
                    self._handle(worker, answer)

    def _handle(self, worker: _PoolWorker, answer: Message) -> None:
        match answer:
            case "loaded", (tokenizer_digest, template_digest, now):
                facts = RendererFacts(
                    tokenizer_digest=tokenizer_digest, template_digest=template_digest, now=now
                )
                if self._facts not in (None, facts):
                    raise TokenizerError(
                        f"{self._source}: the tokenizer or its chat template changed while it was "
                        "being loaded. What is stored is sound: restore the old files and run the "
                        "same command again"
                    )
                self._facts = facts
                worker.is_loaded = True
            case "rows", results:
                batch = worker.in_work.popleft()
                batch.items = list(map(item_of, batch.rows, results))
                self._num_deaths = 0
            case "refused", message:
                raise TokenizerError(message)
            case _:
                raise AssertionError(f"unexpected answer {answer[0]}")

    def _replace(self, worker: _PoolWorker, queue: _Queue, cause: str) -> None:
        """A process died: of the oldest batch that it had, if it had any."""
        self._workers.remove(worker)
        if not worker.is_loaded:
            raise TokenizerError(f"{self._source}: cannot be loaded: {cause}")
        self._num_deaths += 1
        if self._num_deaths >= self._limits.max_deaths:
            raise TokenizerError(
                f"{self._source}: {self._num_deaths} worker processes died one after the other, "
                f"the last because {cause}. Do the tokenizer and its chat template work at all? "
                "What is stored is sound: the same command goes on"
            )
        queue.retry(worker.in_work, cause)


class _Queue:
    """The batches of one call of `prompts_from`."""

    def __init__(self) -> None:
        #: Read and not taken yet, in the order of the rows.
        self.ahead: deque[_Batch] = deque()
        #: Those of them to be sent, or to be sent again.
        self.unsent: deque[_Batch] = deque()

    def add(self, batch: _Batch) -> None:
        """The next batch."""
        self.ahead.append(batch)
        self.unsent.append(batch)

    def retry(self, batches: Iterable[_Batch], cause: str) -> None:
        """Send the batches of a dead process again; of the first, the cause, each row by itself.

        A row that was by itself already fails.
        """
        first, *others = [*batches] or [_Batch([], is_wanted=False)]
        again = [batch for batch in others if batch.is_wanted]
        if first.is_wanted and len(first.rows) == 1:
            first.items = [_failed(first.rows[0], cause)]
        elif first.is_wanted:
            again[:0] = self._split(first)
        self.unsent.extendleft(reversed(again))

    def _split(self, batch: _Batch) -> list[_Batch]:
        parts = [_Batch([row]) for row in batch.rows]
        ahead = list(self.ahead)
        place = ahead.index(batch)
        ahead[place : place + 1] = parts
        self.ahead = deque(ahead)
        return parts


def library_versions() -> dict[str, str]:
    """The versions of the installed packages that affect tokenization and templates."""
    versions = {}
    for name in ("transformers", "tokenizers", "jinja2"):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def check_template(template: str, limits: CodeLimits = DEFAULT_LIMITS) -> None:
    """Raises `TokenizerError` where the chat template's text is no template."""
    process = WorkerProcess(limits)
    try:
        process.send(check_message(template, limits))
        answer = process.receive()
    except WorkerDied as death:
        raise TokenizerError(f"the chat template cannot be checked: {death}") from death
    finally:
        process.kill()
    if answer[0] == "refused":
        raise TokenizerError(answer[1])


def _failed(row: RawRow, cause: str) -> BadRow:
    label = None
    with suppress(RowError):
        label = label_of(decode_row(row.data))
    return BadRow(
        ordinal=row.ordinal,
        origin=row.origin,
        label=label,
        reason=RowReason.RENDER_FAILED,
        detail=cause,
    )


def _batches(rows: Iterable[RawRow], max_rows: int) -> Iterator[_Batch]:
    batch: list[RawRow] = []
    size_bytes = 0
    for row in rows:
        batch.append(row)
        size_bytes += len(row.data)
        if len(batch) == max_rows or size_bytes >= BATCH_BYTES:
            yield _Batch(batch)
            batch, size_bytes = [], 0
    if batch:
        yield _Batch(batch)

"""Shows one row as the model and the drafter will see it, for `extractor show`."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from extractor.core.errors import UsageError
from extractor.core.humanize import counted, table
from extractor.core.timings import DEFAULT_TIMINGS
from extractor.intake.prompt_files import scan_prompts
from extractor.servers.client import Client
from prompts.paths import STDIN, Spool
from prompts.pool import RendererPool
from prompts.stream import raw_rows
from prompts.types import BadRow, Prompt

#: Around trained tokens: signs that no prompt has by chance, and how a terminal shows them.
MARKS = ("⟦", "⟧")
COLOURS = {MARKS[0]: f"\x1b[32m{MARKS[0]}", MARKS[1]: f"{MARKS[1]}\x1b[0m"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """Consecutive tokens that are all trained, or all not."""

    start: int  # number of its first token
    ids: tuple[int, ...]
    is_trained: bool
    text: str | None  # None without a tokenizer


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One row, and its prompt or the reason why it gives none."""

    item: Prompt | BadRow
    num_rows: int  # of all files
    runs: tuple[Run, ...]  # empty for a row that gives no prompt

    def to_document(self) -> dict[str, Any]:
        """The stable JSON of `extractor show --json`."""
        item = self.item
        document: dict[str, Any] = {
            "row": item.ordinal,
            "source": item.origin.source,
            "line": item.origin.line,
            "part": item.origin.part,
            "label": item.label,
        }
        if isinstance(item, BadRow):
            return {**document, "reason": item.reason.value, "detail": item.detail}
        return {
            **document,
            "key": item.key,
            "tokens": item.num_tokens,
            "trained": item.num_trained,
            "alterations": [alteration.value for alteration in item.alterations],
            "runs": [
                {
                    "start": run.start,
                    "tokens": len(run.ids),
                    "trained": run.is_trained,
                    "text": run.text,
                }
                for run in self.runs
            ],
            "input_ids": item.input_ids.tolist(),
            "loss_mask": item.loss_mask.tolist(),
        }

    def to_text(self, *, ids: bool) -> str:
        """What `extractor show` prints."""
        item = self.item
        place = str(item.origin)
        lines = [("row", f"{item.ordinal:,} of {self.num_rows:,}"), ("where", place)]
        if item.origin.part is not None:
            lines.append(("part", f"{item.origin.part}"))
        if item.label is not None:
            lines.append(("label", item.label))
        if isinstance(item, BadRow):
            lines += [("no prompt", item.reason.value), ("why", item.detail)]
            return _facts(lines)
        lines.append(("tokens", f"{item.num_tokens:,}, of these trained {item.num_trained:,}"))
        if item.alterations:
            lines.append(("changed", ", ".join(item.alterations)))
        blocks = [_facts(lines)]
        if any(run.text is not None for run in self.runs):
            blocks.append("".join(_marked(run) for run in self.runs))
        rows = [("tokens", "count", "trained")]
        rows += [_run_line(run) for run in self.runs]
        blocks.append(table(rows))
        if ids:
            blocks.append("\n".join(_id_line(run) for run in self.runs))
        return "\n\n".join(blocks)


async def server_tokenizer(url: str, *, api_key_file: Path | None = None) -> str:
    """Path of the tokenizer that the server uses. Raises UsageError where none answers."""
    async with Client(
        url,
        concurrency=1,
        request_timeout_s=DEFAULT_TIMINGS.client.info_s,
        api_key_file=api_key_file,
    ) as client:
        if not await client.is_answering():
            raise UsageError(
                f"no server answers at {url}: name a --tokenizer (or none, for rows of ids)"
            )
        return (await client.facts()).tokenizer_path


def show_row(words: Sequence[Path], pool: RendererPool, number: int) -> Shown:
    """Row `number` of the files, counted from 0 over all of them, as `extractor run` numbers them.

    Raises UsageError where there are not so many rows, InputError, TokenizerError.
    """
    with tempfile.TemporaryDirectory(prefix="show-") as scratch:
        spool = Spool(Path(scratch))
        files = scan_prompts(words, pool.options, spool=spool)
        num_rows = sum(file.num_rows for file in files)
        if not 0 <= number < num_rows:
            rows_there = counted(num_rows, "row")
            raise UsageError(
                f"--row {number}: of {rows_there}, from 0 on, the last is {num_rows - 1}"
            )
        rows = raw_rows(files, pool.options, skip=lambda ordinal: ordinal != number)
        with closing(rows):
            (item,) = pool.prompts_from(islice(rows, 1))
        if item.origin.source == str(spool.path):
            item = replace(item, origin=replace(item.origin, source=STDIN))
    return Shown(item=item, num_rows=num_rows, runs=_runs(item, pool))


def _runs(item: Prompt | BadRow, pool: RendererPool) -> tuple[Run, ...]:
    if isinstance(item, BadRow):
        return ()
    borders = [0, *(np.flatnonzero(np.diff(item.loss_mask)) + 1).tolist(), item.num_tokens]
    spans = list(pairwise(borders))
    texts = pool.decode([item.input_ids[start:end] for start, end in spans])
    return tuple(
        Run(
            start=start,
            ids=tuple(item.input_ids[start:end].tolist()),
            is_trained=bool(item.loss_mask[start]),
            text=text,
        )
        for (start, end), text in zip(spans, texts, strict=True)
    )


def _facts(lines: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in lines)


def _marked(run: Run) -> str:
    text = run.text or ""
    return f"{MARKS[0]}{text}{MARKS[1]}" if run.is_trained else text


def _run_line(run: Run) -> tuple[str, str, str]:
    end = run.start + len(run.ids)
    return f"[{run.start}, {end})", f"{len(run.ids):,}", "yes" if run.is_trained else "no"


def _id_line(run: Run) -> str:
    ids = " ".join(map(str, run.ids))
    return f"{MARKS[0]}{ids}{MARKS[1]}" if run.is_trained else ids

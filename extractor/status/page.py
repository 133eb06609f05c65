"""Formats a look at a run: a page for a terminal, a line for a log. Pure, except for `rich`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from extractor.core.counters import Stage
from extractor.core.humanize import amount, counted, duration, milliseconds, rate
from extractor.core.printable import printable
from extractor.core.timings import DEFAULT_TIMINGS
from extractor.status.live_file import Live
from extractor.status.watcher import Begun, Look
from manifest.states import State

_GAP = 2  # columns between figures
_NAME: Final = {"style": "dim", "no_wrap": True}
_RIGHT: Final = {"justify": "right", "no_wrap": True}
_STAGE_NAMES = {
    Stage.REQUEST: "request",
    Stage.ARRIVAL: "dump after answer",
    Stage.MOVER_WAIT: "wait for a mover",
    Stage.COPY: "copy of a sample",
    Stage.SYNC: "sync of a group",
    Stage.COMMIT: "commit of a group",
    Stage.RESIDENCY: "dump lifetime",
}


def page(look: Look) -> RenderableType:
    """All figures, for a terminal of any width."""
    parts: list[RenderableType] = [_title(look)]
    if look.begun is not None:
        parts += [_bar(look.begun), _rows(look.begun, None if look.is_over else look.live)]
    if look.live is not None:
        parts.append(_session(look.live, is_over=look.is_over))
        servers = look.live.session["now"]["servers"]
        if not look.is_over and _are_worth_a_table(servers):
            parts += [Rule(style="dim"), _servers(servers)]
        # Without the session's last second: a run removes its file when it ends.
        title = "stages, as last reported" if look.is_over else ""
        parts += [Rule(title, style="dim"), _stages(look.live.session["stages"])]
    if look.begun is not None and look.begun.totals.by_reason:
        parts += [Rule(style="dim"), _failures(look.begun)]
    return Group(*parts)


def line(look: Look) -> str:
    """The main figures, in one line."""
    if look.begun is None:
        return f"{look.out}: {standing(look)}"
    parts = [
        f"{look.begun.num_settled:,}/{look.begun.num_rows:,} rows",
        f"{look.begun.totals.by_state.get(State.FAILED, 0):,} failed",
        f"{amount(look.begun.totals.stored_bytes)} stored",
    ]
    if look.live is not None:
        session, now = look.live.session, look.live.session["now"]
        residency = session["stages"][Stage.RESIDENCY]
        if not look.is_over:
            parts += [
                f"{now['tokens_per_s']:,.0f} tok/s now",
                f"{now['in_flight']} in flight",
                *_servers_in_short(now["servers"]),
                f"shm {amount(now['shm_bytes'])} of {amount(now['budget_bytes'])}",
                f"ETA {_eta(look.begun, look.live)}",
            ]
        parts += [
            f"{session['tokens_per_s']:,.0f} tok/s mean",
            f"dump lifetime {milliseconds(residency['p50_ms'] / 1e3)} p50, "
            f"{milliseconds(residency['p99_ms'] / 1e3)} p99",
        ]
    return f"{', '.join(parts)}; {standing(look)}"


def _servers_in_short(servers: Sequence[Mapping[str, Any]]) -> list[str]:
    if not _are_worth_a_table(servers):
        return []
    return [f"{sum(server['is_up'] for server in servers)} of {len(servers)} servers up"]


def standing(look: Look) -> str:
    """Whether a process is at work, and the remedy if the run ended unfinished."""
    if look.is_done:
        return "done"
    if look.writer is None:
        left = "" if look.begun is None else f" ({counted(look.begun.num_left, 'row')} left)"
        return f"the run ended unfinished{left}; the same command goes on"
    if look.begun is None:
        return f"process {look.writer} is starting"
    if look.live is None:
        return f"process {look.writer} is idle (starting, finishing, or waiting for a server)"
    if look.live.age_s > DEFAULT_TIMINGS.status.old_s:
        return f"process {look.writer} has not reported for {look.live.age_s:.0f} s"
    return f"process {look.writer} is at work"


def _title(look: Look) -> Text:
    title = Text(overflow="fold")
    title.append(printable(str(look.out)), style="bold")
    title.append(
        f"  {standing(look)}", style="yellow" if look.is_over and not look.is_done else "green"
    )
    if look.begun is not None:
        identity = look.begun.identity
        title.append(printable(f"\n{identity.model.path}: {identity.capture_text}"), style="dim")
    return title


def _bar(begun: Begun) -> Table:
    num_settled, num_rows = begun.num_settled, begun.num_rows
    share = num_settled / max(1, num_rows)
    text = f"{100 * share:.1f} %  {num_settled:,} of {counted(num_rows, 'row')}"
    bar = ProgressBar(total=max(1, num_rows), completed=num_settled)
    return _grid([{"ratio": 1}, _RIGHT], [(bar, text)], gap=1)


def _rows(begun: Begun, live: Live | None) -> _Figures:
    stored = begun.totals.by_state.get(State.STORED, 0)
    failed = begun.totals.by_state.get(State.FAILED, 0)
    cells: list[tuple[str, str | Text]] = [
        ("stored", f"{stored:,}"),
        ("failed", Text(f"{failed:,}", style="red" if failed else "")),
        ("left", f"{begun.num_left:,}"),
        ("tokens", f"{begun.totals.stored_tokens:,}"),
        ("bytes", amount(begun.totals.stored_bytes)),
        ("time left", "-" if live is None else _eta(begun, live)),
    ]
    return _Figures(cells)


def _session(live: Live, *, is_over: bool) -> _Figures:
    session, now = live.session, live.session["now"]
    seconds = max(session["seconds"], 1e-9)
    cells: list[tuple[str, str | Text]] = [
        (
            "mean speed",
            f"{session['tokens_per_s']:,.0f} tok/s, {rate(session['bytes'] / seconds)}",
        ),
        ("this session", duration(seconds)),
    ]
    if not is_over:
        cells += [
            ("speed now", f"{now['tokens_per_s']:,.0f} tok/s"),
            ("in flight", f"{now['in_flight']:,} of {now['request_limit']:,}"),
            ("budget", f"{amount(now['shm_bytes'])} of {amount(now['budget_bytes'])}"),
            ("wait for room", f"{now['budget_queue']:,}"),
            ("wait for mover", f"{now['mover_queue']:,}"),
        ]
    cells.append(("sent again", f"{session['retried']:,}"))
    return _Figures(cells)


@dataclass(frozen=True)
class _Figures:
    """Names and values: two of each in a row, or one where that would cut them."""

    cells: list[tuple[str, str | Text]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = (cell_len(name) for name, _ in self.cells)
        values = (cell_len(str(value)) for _, value in self.cells)
        is_wide = 2 * (max(names) + max(values)) + 3 * _GAP <= options.max_width
        yield self._in_rows(2 if is_wide else 1)

    def _in_rows(self, per_row: int) -> Table:
        rows = [
            [*chain.from_iterable(self.cells[start : start + per_row])]
            for start in range(0, len(self.cells), per_row)
        ]
        return _grid([_NAME, {**_RIGHT, "ratio": 1}] * per_row, rows)


def _stages(stages: Mapping[str, Mapping[str, float]]) -> Table:
    rows: list[Sequence[RenderableType]] = [_header("stage", "count", "p50", "p99", "longest")]
    for stage, name in _STAGE_NAMES.items():
        figures = stages[stage]
        quantiles = (milliseconds(figures[f"{kind}_ms"] / 1e3) for kind in ("p50", "p99", "max"))
        rows.append((name, f"{figures['count']:,}", *quantiles))
    # Columns as wide as their figures: of equal widths, one would be cut.
    return _grid([_NAME, *[_RIGHT] * 4], rows)


def _are_worth_a_table(servers: Sequence[Mapping[str, Any]]) -> bool:
    """Not for one server that is up: its figures are those of the session."""
    return len(servers) > 1 or not all(server["is_up"] for server in servers)


def _servers(servers: Sequence[Mapping[str, Any]]) -> Table:
    rows: list[Sequence[RenderableType]] = [_header("server", "", "in flight", "answered")]
    for server in servers:
        rows.append(
            (
                Text(printable(server["url"])),
                Text("up", style="green") if server["is_up"] else Text("away", style="yellow"),
                f"{server['in_flight']:,} of {server['request_limit']:,}",
                f"{server['prompts']:,}",
            )
        )
    return _grid([{"overflow": "fold", "ratio": 1}, *[_RIGHT] * 3], rows)


def _failures(begun: Begun) -> Table:
    reasons = sorted(begun.totals.by_reason.items(), key=lambda item: -item[1])
    rows = [(reason.value, f"{count:,}") for reason, count in reasons]
    return _grid([{"no_wrap": True}, {**_RIGHT, "style": "red"}], rows, is_wide=False)


def _header(*names: str) -> list[Text]:
    return [Text(name, style="dim") for name in names]


def _grid(
    columns: Sequence[Mapping[str, Any]],
    rows: Iterable[Sequence[RenderableType]],
    *,
    gap: int = _GAP,
    is_wide: bool = True,
) -> Table:
    grid = Table.grid(padding=(0, gap), expand=is_wide)
    for column in columns:
        grid.add_column(**column)
    for row in rows:
        grid.add_row(*row)
    return grid


def _eta(begun: Begun, live: Live) -> str:
    """Estimated from the recent rows per second; rows differ in length, so it is rough."""
    rows_per_s = float(live.session["now"]["rows_per_s"])
    if not begun.num_left:
        return "none"
    return "-" if rows_per_s <= 0 else duration(begun.num_left / rows_per_s)

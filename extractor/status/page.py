"""How a look at a run is shown: a page for a terminal, a line for a log. Pure but for `rich`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from extractor.core.counters import Stage
from extractor.core.humanize import amount, counted, duration, milliseconds, rate
from extractor.core.timings import DEFAULT_TIMINGS
from extractor.status.live_file import Live
from extractor.status.watcher import Begun, Look
from manifest.states import State

_GAP = 2  # columns between figures
_STAGE_NAMES = {
    Stage.REQUEST: "request",
    Stage.ARRIVAL: "dump after answer",
    Stage.MOVER_WAIT: "wait for a mover",
    Stage.COPY: "copy of a sample",
    Stage.SYNC: "sync of a group",
    Stage.COMMIT: "commit of a group",
    Stage.RESIDENCY: "dump under its root",
}


def page(look: Look) -> RenderableType:
    """All there is to see, for a terminal of any width."""
    parts: list[RenderableType] = [_title(look)]
    if look.begun is not None:
        parts += [_bar(look.begun), _rows(look.begun, None if look.is_over else look.live)]
    if look.live is not None:
        parts.append(_session(look.live, is_over=look.is_over))
        servers = look.live.session["now"]["servers"]
        if not look.is_over and _are_worth_a_table(servers):
            parts += [Rule(style="dim"), _servers(servers)]
        # The session's last second is not in it: a run takes its file with it.
        title = "stages, as last told before the end" if look.is_over else ""
        parts += [Rule(title, style="dim"), _stages(look.live.session["stages"])]
    if look.begun is not None and look.begun.totals.by_reason:
        parts += [Rule(style="dim"), _failures(look.begun)]
    return Group(*parts)


def line(look: Look) -> str:
    """The same in a line."""
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
            f"dumps lie {milliseconds(residency['p50_ms'] / 1e3)} p50, "
            f"{milliseconds(residency['p99_ms'] / 1e3)} p99",
        ]
    return f"{', '.join(parts)}; {standing(look)}"


def _servers_in_short(servers: Sequence[Mapping[str, Any]]) -> list[str]:
    if not _are_worth_a_table(servers):
        return []
    return [f"{sum(server['is_up'] for server in servers)} of {len(servers)} servers up"]


def standing(look: Look) -> str:
    """Whether somebody is at work, and what is to be done where nobody is."""
    if look.is_done:
        return "done"
    if look.writer is None:
        left = "" if look.begun is None else f" ({counted(look.begun.num_left, 'row')} left)"
        return f"the run ended unfinished{left}; the same command goes on"
    if look.begun is None:
        return f"process {look.writer} is starting"
    if look.live is None:
        return f"process {look.writer} sends nothing (it begins, ends, or waits for its server)"
    if look.live.age_s > DEFAULT_TIMINGS.status.old_s:
        return f"process {look.writer} has said nothing for {look.live.age_s:.0f} s"
    return f"process {look.writer} is at work"


def _title(look: Look) -> Text:
    title = Text(overflow="fold")
    title.append(f"{look.out}", style="bold")
    title.append(
        f"  {standing(look)}", style="yellow" if look.is_over and not look.is_done else "green"
    )
    if look.begun is not None:
        identity = look.begun.identity
        title.append(
            f"\n{identity.model.path}: boundaries {list(identity.boundaries)}, "
            f"last {identity.last_kind}, {identity.model.dtype}",
            style="dim",
        )
    return title


def _bar(begun: Begun) -> Table:
    settled = begun.num_settled
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(ratio=1)
    grid.add_column(justify="right", no_wrap=True)
    share = settled / max(1, begun.num_rows)
    grid.add_row(
        ProgressBar(total=max(1, begun.num_rows), completed=settled),
        Text(f"{100 * share:.1f} %  {settled:,} of {counted(begun.num_rows, 'row')}"),
    )
    return grid


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
        grid = Table.grid(padding=(0, _GAP), expand=True)
        for _ in range(per_row):
            grid.add_column(style="dim", no_wrap=True)
            grid.add_column(justify="right", no_wrap=True, ratio=1)
        for start in range(0, len(self.cells), per_row):
            grid.add_row(*chain.from_iterable(self.cells[start : start + per_row]))
        return grid


def _stages(stages: Mapping[str, Mapping[str, float]]) -> Table:
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(style="dim", no_wrap=True)
    for _ in range(4):  # as wide as their figures: of equal widths, one would be cut
        grid.add_column(justify="right", no_wrap=True)
    grid.add_row("stage", *(Text(name, style="dim") for name in ("count", "p50", "p99", "longest")))
    for stage, name in _STAGE_NAMES.items():
        figures = stages[stage]
        grid.add_row(
            name,
            f"{figures['count']:,}",
            *(milliseconds(figures[f"{kind}_ms"] / 1e3) for kind in ("p50", "p99", "max")),
        )
    return grid


def _are_worth_a_table(servers: Sequence[Mapping[str, Any]]) -> bool:
    """What one server does is what the session does."""
    return len(servers) > 1 or not all(server["is_up"] for server in servers)


def _servers(servers: Sequence[Mapping[str, Any]]) -> Table:
    grid = Table.grid(padding=(0, _GAP), expand=True)
    grid.add_column(overflow="fold", ratio=1)
    for _ in range(3):
        grid.add_column(justify="right", no_wrap=True)
    grid.add_row(*(Text(name, style="dim") for name in ("server", "", "in flight", "answered")))
    for server in servers:
        grid.add_row(
            server["url"],
            Text("up", style="green") if server["is_up"] else Text("away", style="yellow"),
            f"{server['in_flight']:,} of {server['request_limit']:,}",
            f"{server['prompts']:,}",
        )
    return grid


def _failures(begun: Begun) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", style="red")
    for reason, count in sorted(begun.totals.by_reason.items(), key=lambda item: -item[1]):
        grid.add_row(reason.value, f"{count:,}")
    return grid


def _eta(begun: Begun, live: Live) -> str:
    """From the rows of late; they are not equally long, so it is about so long."""
    rows_per_s = float(live.session["now"]["rows_per_s"])
    if not begun.num_left:
        return "none"
    return "-" if rows_per_s <= 0 else duration(begun.num_left / rows_per_s)

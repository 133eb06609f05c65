"""How the parts of a run report what happens. Pure."""

from __future__ import annotations

from typing import Protocol

from extractor.core.counters import Counters


class ReportLine(Protocol):
    """Reports one line to a person; to a program, what happened and its particulars."""

    def __call__(
        self, message: str, *, event: str = "note", level: str = "info", **fields: object
    ) -> None: ...


class Reporter(Protocol):
    """Shows a run's progress. `update` is called often and must be cheap."""

    def update(self, counters: Counters) -> None: ...

    @property
    def report(self) -> ReportLine:
        """For lines beside the progress."""

    def close(self) -> None:
        """The progress is over; more may come, with an `update`."""

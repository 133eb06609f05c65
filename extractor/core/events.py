"""How the parts of a run report what happens. Pure."""

from __future__ import annotations

from typing import Protocol

from extractor.core.counters import Counters


class ReportLine(Protocol):
    """How the parts of a run tell what happens: `Reporter.report`."""

    def __call__(
        self, message: str, *, event: str = "note", level: str = "info", **fields: object
    ) -> None: ...


class Reporter(Protocol):
    """Shows a run's progress. `update` is called often and must be cheap."""

    def update(self, counters: Counters) -> None: ...

    def report(
        self, message: str, *, event: str = "note", level: str = "info", **fields: object
    ) -> None:
        """One line for a person, beside the progress; for a program, what happened and its
        particulars."""

    def close(self) -> None:
        """The progress is over; more may come, with an `update`."""

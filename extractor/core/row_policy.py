"""What becomes of prompts that are too long, too short, double or bad. Pure values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Final

from extractor.core.errors import UsageError
from extractor.core.option import MAX_COUNT, Option, check_options


class OnTooLong(StrEnum):
    """A prompt longer than the server takes, or than `--max-tokens`."""

    SKIP = "skip"  # the row fails with too_long
    TRUNCATE = "truncate"  # its first tokens are kept, and that is recorded
    FAIL = "fail"  # the run stops


class OnBadRow(StrEnum):
    """A row that gives no prompt."""

    SKIP = "skip"  # the row fails with its reason
    FAIL = "fail"  # the run stops


class OnDuplicate(StrEnum):
    """A prompt that an earlier row gave already."""

    KEEP = "keep"
    SKIP = "skip"  # the row fails with duplicate, which is then no failure of the run


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Raises UsageError for bounds that no prompt can meet."""

    on_too_long: Annotated[
        OnTooLong,
        Option(
            "--on-too-long",
            "Prompts longer than the server takes or --max-tokens: fail the row, keep their "
            "beginning, or stop the run.",
        ),
    ] = OnTooLong.SKIP
    on_bad_row: Annotated[
        OnBadRow, Option("--on-bad-row", "Rows that give no prompt: fail them, or stop the run.")
    ] = OnBadRow.SKIP
    on_duplicate: Annotated[
        OnDuplicate,
        Option(
            "--on-duplicate",
            "Prompts that an earlier row gave: extract them again, or leave them out (at about "
            "150 bytes of memory a row).",
        ),
    ] = OnDuplicate.KEEP
    max_tokens: Annotated[
        int | None,
        Option(
            "--max-tokens",
            "Longest prompt.  [default: what the server takes]",
            least=1,
            most=MAX_COUNT,
        ),
    ] = None
    min_tokens: Annotated[
        int, Option("--min-tokens", "Shortest prompt.", least=1, most=MAX_COUNT)
    ] = 1
    min_trained: Annotated[
        int,
        Option(
            "--min-trained",
            "Minimum trained tokens of a prompt, counted after a cut; prompts with fewer fail.",
            least=0,
            most=MAX_COUNT,
        ),
    ] = 0

    def __post_init__(self) -> None:
        check_options(self)
        for option, least in (
            ("--min-tokens", self.min_tokens),
            ("--min-trained", self.min_trained),
        ):
            if self.max_tokens is not None and self.max_tokens < least:
                raise UsageError(f"--max-tokens {self.max_tokens} is less than {option} {least}")

    def to_document(self) -> dict[str, Any]:
        """The part that decides what is in a data set, JSON-ready."""
        return {
            "on_too_long": self.on_too_long.value,
            "on_duplicate": self.on_duplicate.value,
            "max_tokens": self.max_tokens,
            "min_tokens": self.min_tokens,
            "min_trained": self.min_trained,
        }


DEFAULT_POLICY: Final = Policy()

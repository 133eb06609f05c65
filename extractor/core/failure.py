"""Why one attempt gave no sample. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from manifest.states import Reason


class FailureKind(Enum):
    """What went wrong, who is at fault, and whether the server may still process the request.

    `counts`: whether it costs the prompt one of its attempts. `blames_server`: whether the server
    may be out of order. `may_be_processed`: whether the server may still dump the request.
    """

    # name, counts, blames_server, may_be_processed
    PERMANENT = "permanent", True, False, False  # rejected: given up at once
    SAMPLE = "sample", True, False, False  # answered, but not with what was asked for
    SERVER = "server", True, True, False  # the server answered with an error of its own
    SILENT = "silent", True, True, True  # no answer in time
    BUSY = "busy", False, False, False  # refused for now
    FULL = "full", False, False, False  # somebody else filled the dump root
    HUNG_UP = "hung_up", False, False, True  # a gateway dropped the request
    COPY = "copy", False, True, True  # the server processes an earlier copy of the request
    BROKEN = "broken", False, True, True  # the connection broke off after the request was sent
    UNSENT = "unsent", False, True, False  # no connection to the server

    def __init__(
        self, text: str, counts: bool, blames_server: bool, may_be_processed: bool
    ) -> None:
        self.counts = counts
        self.blames_server = blames_server
        self.may_be_processed = may_be_processed

    @property
    def is_refusal(self) -> bool:
        """Whether the server asks for fewer requests at a time."""
        return self in (FailureKind.BUSY, FailureKind.HUNG_UP)

    @property
    def is_lost(self) -> bool:
        """Whether there was no server at the other end."""
        return self in (FailureKind.BROKEN, FailureKind.UNSENT)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One attempt that gave no sample.

    `reason`: what the manifest gets if the prompt is given up for it.
    """

    reason: Reason
    detail: str
    kind: FailureKind = FailureKind.SAMPLE

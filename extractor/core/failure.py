"""Why one attempt gave no sample. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from manifest.states import Reason


class FailureKind(Enum):
    """Who is at fault, and whether the server may still process the request.

    | kind | counts as an attempt | blames the server | may still be processed |
    |---|---|---|---|
    | PERMANENT | gives up at once | no | no |
    | SAMPLE | yes | no | no |
    | SERVER | yes | yes | no |
    | SILENT | yes | yes | yes |
    | BUSY | no | no | no |
    | HUNG_UP | no | no | yes |
    | COPY | no | yes | yes |
    | BROKEN | no | yes | yes |
    | UNSENT | no | yes | no |
    """

    PERMANENT = "permanent"  # rejected, or of the wrong shape: trying again cannot help
    SAMPLE = "sample"  # answered, but the dump or the answer is not what was asked for
    SERVER = "server"  # the server answered with an error of its own
    SILENT = "silent"  # no answer in time
    BUSY = "busy"  # refused for now, or no room for the dump
    HUNG_UP = "hung_up"  # a gateway dropped the request
    COPY = "copy"  # the server processes an earlier copy of the request, whose dump may arrive
    BROKEN = "broken"  # the connection broke off after the request was sent
    UNSENT = "unsent"  # no connection to the server

    @property
    def counts(self) -> bool:
        """Whether it costs the prompt one of its attempts."""
        return self in _COUNTED

    @property
    def is_refusal(self) -> bool:
        """Whether the server asks for fewer requests at a time."""
        return self in _REFUSALS

    @property
    def blames_server(self) -> bool:
        """Whether the server may be out of order."""
        return self in _BLAME_SERVER

    @property
    def may_be_processed(self) -> bool:
        """Whether the server may still process the request, and dump it."""
        return self in _MAY_BE_PROCESSED

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


_COUNTED = {FailureKind.PERMANENT, FailureKind.SAMPLE, FailureKind.SERVER, FailureKind.SILENT}
_REFUSALS = {FailureKind.BUSY, FailureKind.HUNG_UP}
_MAY_BE_PROCESSED = {
    FailureKind.SILENT, FailureKind.HUNG_UP, FailureKind.COPY, FailureKind.BROKEN,
}  # fmt: skip
_BLAME_SERVER = {
    FailureKind.SERVER, FailureKind.SILENT, FailureKind.COPY, FailureKind.BROKEN,
    FailureKind.UNSENT,
}  # fmt: skip

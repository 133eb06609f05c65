"""What a fake server can do wrong, and with which requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum

from extractor.core.rids import PROBE_SESSION

#: Duration of a late answer; a test's time-out is shorter.
LATE_S = 1.0
#: Processing time of a request's first copy, while its second copy is refused.
COPY_S = 0.05
#: Pause between two bytes of an answer that drips.
DRIP_S = 0.02


class Fault(StrEnum):
    """What may go wrong with one request."""

    BUSY = "busy"  # answers 503
    TOO_MANY = "too_many"  # answers 429
    ERROR = "error"  # answers 500
    REJECT = "reject"  # answers 400
    LOCKED = "locked"  # answers 401
    DUPLICATE = "duplicate"  # answers 400 as to a gateway's second copy; the first one still dumps
    LOST_COPY = "lost_copy"  # the same, but the first copy ended with its connection: never dumps
    QUEUE_ABORT = "queue_abort"  # answers 200: aborted in the waiting queue
    ODD_REPLY = "odd_reply"  # answers with a field of the wrong type
    DRIP = "drip"  # dumps, and answers one byte at a time without end
    RESET = "reset"  # closes the connection without an answer
    SILENT = "silent"  # dumps, but never answers
    LATE = "late"  # dumps and answers so late that the client has tried again
    CLOSE = "close"  # answers, then closes the connection that the next request was to use
    OTHER_RID = "other_rid"  # answers as if to another request
    DIE = "die"  # the server process ends, as after a device assert
    NO_DUMP = "no_dump"  # answers, but dumps nothing
    SHORT_DUMP = "short_dump"  # the last row is missing
    DOUBLE_DUMP = "double_dump"  # every piece comes twice
    WRONG_IDS = "wrong_ids"  # one token of the dump differs
    NONFINITE = "nonfinite"  # one state is NaN
    WRONG_BOUNDARIES = "wrong_boundaries"
    ERROR_RECORD = "error_record"  # the plugin could not write
    TORN_DUMP = "torn_dump"  # half a file under a final name
    CACHED = "cached"  # the first rows came from the prefix cache
    TRUNCATED = "truncated"  # the server cut the prompt


FaultPlan = Callable[[int, str], Fault | None]
"""(number of the request from 0, rid) -> what goes wrong with it."""


def no_faults(number: int, rid: str) -> Fault | None:
    return None


def faults_once(plan: Mapping[int, Fault]) -> FaultPlan:
    """The given faults at the given request numbers, and none elsewhere."""
    return lambda number, rid: plan.get(number)


def faults_often(fault: Fault, *, every: int, row: int | None = None) -> FaultPlan:
    """A fault in every Nth request, or, with `row`, in every request about that row."""

    def plan(number: int, rid: str) -> Fault | None:
        if row is None:
            return fault if number % every == every - 1 else None
        *_, session, ordinal, _attempt = rid.split("-")
        is_row = ordinal == str(row) and not session.startswith(PROBE_SESSION)
        return fault if is_row else None

    return plan

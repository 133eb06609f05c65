"""Request ids: how they are made, and what they say. Pure."""

from __future__ import annotations

RID_PREFIX = "xtr-"


#: How the session of a probe's rid begins.
PROBE_SESSION = "probe"


def rid_prefix(run_id: str) -> str:
    """What the rids of every request of one run begin with; tells its dumps from other runs'."""
    return f"{RID_PREFIX}{run_id}-"


def run_of(rid: str) -> str | None:
    """The run that a request was of; None for a request that is none of ours.

    >>> run_of(make_rid(run_id="ab12", session_id="c0ffee", ordinal=42, attempt=3)), run_of("x-1")
    ('ab12', None)
    """
    run_id, dash, _ = rid.removeprefix(RID_PREFIX).partition("-")
    return run_id if dash and rid.startswith(RID_PREFIX) else None


def make_rid(*, run_id: str, session_id: str, ordinal: int, attempt: int) -> str:
    """A rid that was never used before: run, session (one process), prompt, attempt."""
    return f"{rid_prefix(run_id)}{session_id}-{ordinal}-{attempt}"


def ordinal_of(rid: str, *, run_id: str) -> int | None:
    """The row that a request of this run was about; None for a probe or another run's request.

    >>> rid = make_rid(run_id="ab12", session_id="c0ffee", ordinal=42, attempt=3)
    >>> ordinal_of(rid, run_id="ab12"), ordinal_of(rid, run_id="ab13")
    (42, None)
    """
    if not rid.startswith(rid_prefix(run_id)):
        return None
    parts = rid.removeprefix(rid_prefix(run_id)).split("-")
    if len(parts) != 3 or not parts[1].isdecimal() or parts[0].startswith(PROBE_SESSION):
        return None
    return int(parts[1])

"""How long the parts of a command wait, and how much they handle at once. Pure values.

A command hands one `Timings` to everything below it; each part takes its own group. What a user may
choose is an option (`RunOptions`, `ServeOptions`); these are the waits and sizes behind them. Tests
hand in other values, so that they need not wait.

>>> quick = Timings(health=HealthTimings(gone_after_s=0.5))
>>> quick.health.gone_after_s, quick.health.useless_after_s
(0.5, 600.0)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from prompts.worker_messages import DEFAULT_LIMITS, CodeLimits


@dataclass(frozen=True, kw_only=True)
class ClientTimings:
    """HTTP to one server."""

    connect_s: float = 10.0
    keep_alive_s: float = 3.0  # an idle connection; SGLang's web server closes one after 5 s
    info_s: float = 30.0  # a question about the server itself
    answering_s: float = 5.0  # a question whether it answers at all
    poll_s: float = 0.5  # between two such questions
    abort_s: float = 2.0  # an abort is best effort
    at_once_s: float = 1.0  # a health check without a forward: SGLang looks for its end every 1 s
    tls_trial_s: float = 5.0  # a handshake that shows whether a port speaks TLS


@dataclass(frozen=True, kw_only=True)
class ProbeTimings:
    """The probe prompt, and the stages of a server's start that lead to it."""

    timeout_s: float = 60.0  # from sending the probe prompt to its whole dump
    busy_pause_s: float = 1.0  # before a refused probe is sent again
    speed_s: float = 5.0  # how long a dry run measures the server's speed
    stage_poll_s: float = 0.25  # between two looks at a starting server
    first_request_s: float = 300.0  # the first request of a server, which may compile kernels


@dataclass(frozen=True, kw_only=True)
class StopTimings:
    """From a stop signal to the end of the process."""

    end_s: float = 18.0  # all of it: job schedulers kill after 30 s, some after 20 s
    drain_s: float = 9.0  # requests in flight get this long to end
    server_s: float = 15.0  # a server of ours, from SIGTERM to SIGKILL
    kill_s: float = 5.0  # kept for killed processes to exit and for the cleanup behind them
    log_s: float = 0.5  # the last message, before the process is ended by force
    threads_s: float = 0.5  # threads, once the command has cleaned up


@dataclass(frozen=True, kw_only=True)
class ListingTimings:
    """Directory listings: the fallback of inotify."""

    interval_s: float = 1.0  # between two listings
    cost_s: float = 0.02  # slower listings (about 10,000 files) are made proportionally less often
    pauses: int = 4  # without inotify: the pause between listings, in durations of a listing
    busy_pause_s: float = 0.005  # between two looks while files arrive
    idle_pause_s: float = 0.02  # the same while none do, without inotify


@dataclass(frozen=True, kw_only=True)
class CollectTimings:
    """Dumps: how they are found and read."""

    listing: ListingTimings = ListingTimings()
    whole_bytes: int = 64 << 10  # dumps up to this size are read whole, with their header
    reads_at_once: int = 256  # files to open before other tasks of the event loop get a turn
    late_dumps_s: float = 2.0  # at the end, for dumps of requests that were given up
    max_other_names: int = 1 << 20  # names of other runs' files to remember, of about 100 bytes


@dataclass(frozen=True, kw_only=True)
class HealthTimings:
    """When a server is paused, probed, and given up."""

    refused_open_s: float = 10.0  # refusals of every prompt for this long pause the server
    trial_after_s: float = 30.0  # refusals of every prompt for this long are checked with a probe
    trial_pause_s: float = 15.0  # longest pause between two probes
    gone_after_s: float = 30.0  # a server that answers nothing for this long is taken for dead
    useless_after_s: float = 600.0  # one that answers but serves nothing gets longer to recover
    space_patience_s: float = 60.0  # how long a dump root that somebody else filled may stay full
    alive_interval_s: float = 0.5  # between two looks at the server's process
    drain_interval_s: float = 5.0  # between two questions whether it is shutting down


@dataclass(frozen=True, kw_only=True)
class DispatchTimings:
    """Reading prompts, sending them, and sending them again."""

    read_rows: int = 128  # prompts of one visit to the reading thread
    read_s: float = 0.01  # the visit ends with the first prompt after this long
    retry_base_s: float = 0.5  # longest delay after the first failure; doubled by each further one
    retry_max_s: float = 30.0  # longest delay after any
    death_shows_s: float = 2.0  # after a broken connection, until a dead server is found dead
    return_pause_s: float = 2.0  # between two looks whether a lost server has come back


@dataclass(frozen=True, kw_only=True)
class StoreTimings:
    """Making samples durable in groups."""

    small_bytes: int = 1 << 20  # a group that begins with a smaller sample waits for more
    gather_s: float = 0.02  # how long it waits: a sync costs more than a small sample's bytes
    group_samples: int = 256  # most of one group: bounds how long a dump waits for its sync
    group_bytes: int = 128 << 20
    undivided_bytes: int = 8 << 20  # up to this, samples go to one mover though others are idle
    rejections: int = 1000  # failed rows of one commit
    min_free_bytes: int = 64 << 20  # of the output disk, for a run to begin


@dataclass(frozen=True, kw_only=True)
class StatusTimings:
    """What a person or a monitor sees."""

    report_interval_s: float = 0.5  # between two updates of a run's reporters
    line_interval_s: float = 30.0  # between two lines of progress in a log
    live_interval_s: float = 1.0  # between two writes of `.live.json`
    stale_s: float = 30.0  # a `.live.json` from another PID namespace that is older is dead
    old_s: float = 5.0  # from this age on, the age is shown
    look_interval_s: float = 1.0  # between two looks of `status --watch`
    patience_s: float = 5.0  # for a run that is started at the same moment as the watcher


@dataclass(frozen=True, kw_only=True)
class Timings:
    """All of them."""

    code: CodeLimits = DEFAULT_LIMITS
    client: ClientTimings = ClientTimings()
    probe: ProbeTimings = ProbeTimings()
    stop: StopTimings = StopTimings()
    collect: CollectTimings = CollectTimings()
    health: HealthTimings = HealthTimings()
    dispatch: DispatchTimings = DispatchTimings()
    store: StoreTimings = StoreTimings()
    status: StatusTimings = StatusTimings()


DEFAULT_TIMINGS: Final = Timings()

"""The health of a server, whatever it answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extractor.core.failure import Failure, FailureKind
from extractor.core.timings import HealthTimings
from extractor.dispatch.health import Ending, Health, HealthState
from extractor.dispatch.limiter import Limiter
from manifest.states import Reason

PATIENCE = HealthTimings()

outcomes = st.lists(
    st.tuples(st.sampled_from([None, *FailureKind]), st.floats(0, 100)), max_size=200
)


def failure(kind: FailureKind) -> Failure:
    return Failure(reason=Reason.SERVER_ERROR, detail=kind.name, kind=kind)


def played(events: Sequence[tuple[FailureKind | None, float]]) -> tuple[Health, float]:
    health, now = Health(Limiter(64), PATIENCE), 0.0
    for kind, pause_s in events:
        now += pause_s
        health.note(kind and failure(kind), now=now, sent_at=now)
    return health, now


@given(outcomes)
def test_one_served_request_makes_up_for_everything(
    events: list[tuple[FailureKind | None, float]],
) -> None:
    health, now = played(events)
    health.note(None, now=now, sent_at=now)
    assert health.state is HealthState.SERVING
    assert health.limit >= 1
    assert health.ending(now=now + 10**9) is None
    assert health.trouble_s(now=now + 1) == 0


@given(outcomes)
def test_the_limit_is_zero_exactly_while_the_server_gets_no_prompts(
    events: list[tuple[FailureKind | None, float]],
) -> None:
    health, now = played(events)
    assert (health.limit == 0) is (health.state is not HealthState.SERVING)
    if health.state is HealthState.PAUSED:
        assert health.needs_trial(now=now)


@given(st.lists(st.floats(0, 100), max_size=50))
def test_refusals_alone_pause_a_server_when_nothing_is_served_for_long(
    pauses: list[float],
) -> None:
    health, now = played([(FailureKind.BUSY, pause_s) for pause_s in pauses])
    is_long = health.trouble_s(now=now) > PATIENCE.refused_open_s
    assert (health.state is HealthState.PAUSED) is is_long


def test_a_probe_that_is_not_answered_pauses_the_server_as_well() -> None:
    health, now = played([(FailureKind.SERVER, 1.0)] * 7)
    assert health.state is HealthState.SERVING
    health.note(failure(FailureKind.SILENT), now=now, sent_at=now, is_probe=True)
    assert (health.state, health.limit) == (HealthState.PAUSED, 0)


def test_what_is_the_prompts_own_fault_is_service() -> None:
    health, _ = played([(FailureKind.SERVER, 1.0)] * 8 + [(FailureKind.PERMANENT, 1.0)])
    assert health.state is HealthState.SERVING
    assert health.num_served == 0


def test_a_time_out_halves_the_limit_like_a_refusal() -> None:
    health, _ = played([(None, 1.0), (FailureKind.SILENT, 1.0)])
    assert health.limit == 32


def test_a_server_that_does_not_answer_is_given_up_sooner_than_one_that_does() -> None:
    for kind, ending, patience_s in (
        (FailureKind.BROKEN, Ending.GONE, PATIENCE.gone_after_s),
        (FailureKind.UNSENT, Ending.GONE, PATIENCE.gone_after_s),
        (FailureKind.SERVER, Ending.USELESS, PATIENCE.useless_after_s),
        (FailureKind.BUSY, Ending.USELESS, PATIENCE.useless_after_s),
    ):
        health, now = played([(kind, 0.0)])
        assert health.ending(now=now + patience_s) is None
        assert health.ending(now=now + patience_s + 1) is ending


def test_a_server_that_shuts_down_gets_nothing_until_it_says_otherwise_or_is_given_up() -> None:
    health, now = played([])
    health.note_stopping(True, now=now)
    assert (health.state, health.limit) == (HealthState.STOPPING, 0)
    assert health.ending(now=now + PATIENCE.useless_after_s + 1) is Ending.NOT_STOPPED
    health.note_stopping(False, now=now)
    assert (health.state, health.limit) == (HealthState.SERVING, 64)


def test_a_dump_root_that_stays_full_ends_the_run() -> None:
    health, now = played([])
    health.note_full(Path("/dev/shm"), 10, now=now)
    health.note_full(Path("/dev/shm"), 20, now=now + 1)
    assert health.ending(now=now + PATIENCE.space_patience_s) is None
    assert health.ending(now=now + PATIENCE.space_patience_s + 1) is Ending.NO_SPACE
    assert health.full is not None
    assert (health.full.need_bytes, health.full.since) == (20, now)


@pytest.mark.parametrize("kind", [FailureKind.BROKEN, FailureKind.UNSENT])
def test_a_server_that_did_not_answer_at_all_is_probed_at_once(kind: FailureKind) -> None:
    health, now = played([(kind, 0.0)])
    assert health.needs_trial(now=now)
    health, now = played([(FailureKind.SERVER, 0.0)])
    assert not health.needs_trial(now=now)

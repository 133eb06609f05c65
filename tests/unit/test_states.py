"""The state machine is total, and its words are closed lists."""

from __future__ import annotations

import pytest

from manifest.states import TRANSITIONS, Event, IllegalTransition, Reason, State, advance
from prompts.types import RowReason

PAIRS = [(state, event) for state in State for event in Event]


def test_every_state_has_its_transitions() -> None:
    assert set(TRANSITIONS) == set(State)


@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_every_pair_leads_to_a_state_or_is_refused(state: State, event: Event) -> None:
    if event in TRANSITIONS[state]:
        assert advance(state, event) is TRANSITIONS[state][event]
    else:
        with pytest.raises(IllegalTransition, match=f"{event} from {state}"):
            advance(state, event)


@pytest.mark.parametrize("state", State)
def test_no_run_leaves_a_terminal_state_and_every_other_leads_to_both(state: State) -> None:
    assert state.is_terminal == (state in (State.STORED, State.FAILED))
    if state.is_terminal:
        # A person may ask to try again; what was stored may turn out to be gone, or be moved.
        left_by = {Event.REOPEN} if state is State.FAILED else {Event.FORGET, Event.MOVE}
        assert set(TRANSITIONS[state]) == left_by
    else:
        assert advance(state, Event.STORE) is State.STORED
        assert advance(state, Event.FAIL) is State.FAILED
        assert advance(state, Event.RETRY) is advance(state, Event.LOSE) is state


def test_every_state_can_be_reached() -> None:
    reached = {State.PLANNED}
    while new := {after for state in reached for after in TRANSITIONS[state].values()} - reached:
        reached |= new
    assert reached == set(State)


def test_every_reason_of_an_input_row_is_a_reason_of_the_manifest() -> None:
    assert {reason.value for reason in RowReason} <= {reason.value for reason in Reason}

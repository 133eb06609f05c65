"""The words of the manifest are closed lists."""

from __future__ import annotations

from manifest.states import Reason, State
from prompts.types import RowReason


def test_stored_and_failed_rows_are_settled() -> None:
    assert {state for state in State if state.is_terminal} == {State.STORED, State.FAILED}


def test_every_reason_of_an_input_row_is_a_reason_of_the_manifest() -> None:
    assert {reason.value for reason in RowReason} <= {reason.value for reason in Reason}

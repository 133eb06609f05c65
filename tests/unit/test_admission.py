"""Which prompts are sent, and why the others are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import LAYOUT, Ids, prompt_of

from extractor.core.admission import Admission, Refusal, Room, token_bound
from extractor.core.errors import RowRefused, UsageError
from extractor.core.request import Limits
from extractor.core.row_policy import DEFAULT_POLICY, OnBadRow, OnDuplicate, OnTooLong, Policy
from manifest.states import Reason
from prompts.token_bound import TokenBound
from prompts.types import Alteration, BadRow, Prompt, RowOrigin, RowReason

LIMITS = Limits(max_prompt_tokens=8, vocab_size=100, chunk_tokens=8)
BAD = BadRow(
    ordinal=3,
    origin=RowOrigin(source="a.jsonl", line=4),
    label=None,
    reason=RowReason.BAD_JSON,
    detail="unexpected end at character 3",
)


def prompt(count: int, *, ordinal: int = 0, trained: int | None = None, **changes: Any) -> Prompt:
    """`count` tokens, of which the last `trained` are trained; all, when nothing is said."""
    mask = [0] * count if trained is not None else [1] * count
    if trained:
        mask[-trained:] = [1] * trained
    made = prompt_of(Ids(ids=tuple(range(count)), mask=tuple(mask)), ordinal=ordinal)
    return Prompt(**{**{name: getattr(made, name) for name in made.__slots__}, **changes})


def judge(row: Prompt | BadRow, limits: Limits | None = LIMITS, **policy: Any) -> Prompt | Refusal:
    return Admission(Policy(**policy), limits, None).judge(row)


def reason_of(judged: Prompt | Refusal) -> Reason:
    assert isinstance(judged, Refusal)
    return judged.reason


def test_a_prompt_within_the_limits_passes_as_it_is() -> None:
    row = prompt(8)
    assert judge(row) is row
    assert judge(prompt(9), None) is not None


def test_case_93_too_long_is_skipped_cut_or_stops_the_run() -> None:
    row = prompt(9, trained=3)
    refused = judge(row)
    assert refused == Refusal(reason=Reason.TOO_LONG, detail="9 tokens, the server takes 8")
    cut = judge(row, on_too_long=OnTooLong.TRUNCATE)
    assert isinstance(cut, Prompt)
    assert (cut.num_tokens, cut.num_trained, cut.alterations) == (8, 2, (Alteration.TRUNCATED,))
    assert np.array_equal(cut.input_ids, row.input_ids[:8])
    with pytest.raises(RowRefused, match=r"prompts.jsonl:1: too_long: 9 tokens.*--on-too-long"):
        judge(row, on_too_long=OnTooLong.FAIL)


def test_a_row_rejected_as_too_long_before_tokenising_is_treated_the_same() -> None:
    row = replace(BAD, reason=RowReason.TOO_LONG, detail="more than 16 tokens")
    detail = "more than 16 tokens, the server takes 8"
    for policy in (OnTooLong.SKIP, OnTooLong.TRUNCATE):
        judged = judge(row, on_too_long=policy, on_bad_row=OnBadRow.FAIL)
        assert judged == Refusal(reason=Reason.TOO_LONG, detail=detail)
    with pytest.raises(RowRefused, match=f"a.jsonl:4: too_long: {detail}.*--on-too-long"):
        judge(row, on_too_long=OnTooLong.FAIL)
    assert judge(row, None) == Refusal(
        reason=Reason.TOO_LONG,
        detail="more than 16 tokens, longer than any server is known to take",
    )


def test_the_render_bound_matches_the_admission_limits() -> None:
    assert token_bound(DEFAULT_POLICY, None) == TokenBound()
    # Without a limit to cut to, a beginning must not be taken for the whole prompt.
    truncate = Policy(on_too_long=OnTooLong.TRUNCATE)
    assert token_bound(truncate, None) == TokenBound()
    assert token_bound(truncate, LIMITS) == TokenBound(max_tokens=8, keeps_beginning=True)
    assert token_bound(Policy(max_tokens=5), LIMITS) == TokenBound(max_tokens=5)


def test_a_limit_of_ones_own_counts_when_it_is_lower() -> None:
    assert judge(prompt(6), max_tokens=5) == Refusal(
        reason=Reason.TOO_LONG, detail="6 tokens, --max-tokens is 5"
    )
    assert judge(prompt(9), max_tokens=50) == Refusal(
        reason=Reason.TOO_LONG, detail="9 tokens, the server takes 8"
    )
    assert reason_of(judge(prompt(6), None, max_tokens=5)) == Reason.TOO_LONG
    assert judge(prompt(2), min_tokens=3) == Refusal(
        reason=Reason.TOO_SHORT, detail="2 tokens, --min-tokens is 3"
    )


def test_case_91_an_answer_behind_the_cut_leaves_nothing_to_learn() -> None:
    row = prompt(12, trained=3, has_answer=True)
    refused = judge(row, on_too_long=OnTooLong.TRUNCATE)
    assert refused == Refusal(
        reason=Reason.NO_SUPERVISION,
        detail="no token of its answers is trained: they lie behind token 8, where it was cut",
    )
    # A prompt that never had an answer is what its user wants it to be.
    assert isinstance(judge(prompt(4, trained=0)), Prompt)


def test_case_22_a_token_outside_the_vocabulary_is_never_sent() -> None:
    row = prompt_of(Ids(ids=(1, 100), mask=(1, 1)))
    assert reason_of(judge(row)) == Reason.TOKEN_OUT_OF_RANGE


def test_a_bad_row_keeps_its_reason_or_stops_the_run() -> None:
    assert judge(BAD) == Refusal(reason=Reason.BAD_JSON, detail=BAD.detail)
    with pytest.raises(RowRefused, match=r"a.jsonl:4: bad_json: .*leave --on-bad-row fail out"):
        judge(BAD, on_bad_row=OnBadRow.FAIL)


def test_case_88_duplicates_are_kept_unless_asked_and_the_first_one_always() -> None:
    rows = [prompt(4, ordinal=0), prompt(5, ordinal=1), prompt(4, ordinal=2)]
    keeping = Admission(Policy(), LIMITS, None)
    assert [keeping.judge(row) for row in rows] == rows
    skipping = Admission(Policy(on_duplicate=OnDuplicate.SKIP), LIMITS, None)
    judged = [skipping.judge(row) for row in rows]
    assert judged[:2] == rows[:2]
    assert judged[2] == Refusal(reason=Reason.DUPLICATE, detail="row 0 gives the same prompt")


def test_a_row_that_an_earlier_session_left_unfinished_is_no_duplicate_of_itself() -> None:
    row = prompt(4, ordinal=7)
    seen = {bytes.fromhex(row.key): 7}
    again = Admission(Policy(on_duplicate=OnDuplicate.SKIP), LIMITS, None, seen=seen)
    assert again.judge(row) is row
    assert reason_of(again.judge(prompt(4, ordinal=9))) == Reason.DUPLICATE


@pytest.mark.parametrize("has_answer", [True, False])
def test_prompts_that_train_too_little_fail_when_asked(has_answer: bool) -> None:
    row = prompt(8, trained=2, has_answer=has_answer)
    assert judge(row, min_trained=2) is row
    assert judge(row, min_trained=3) == Refusal(
        reason=Reason.TOO_FEW_TRAINED, detail="2 trained tokens, --min-trained is 3"
    )
    cut = judge(prompt(9, trained=3), min_trained=3, on_too_long=OnTooLong.TRUNCATE)
    assert cut == Refusal(
        reason=Reason.TOO_FEW_TRAINED,
        detail="2 trained tokens in the first 8, where it was cut, --min-trained is 3",
    )
    untrained = prompt(8, trained=0)
    assert judge(untrained) is untrained
    assert reason_of(judge(untrained, min_trained=1)) == Reason.TOO_FEW_TRAINED


def test_what_can_never_fit_under_the_dump_root_is_not_sent() -> None:
    room = Room(layout=LAYOUT, budget_bytes=1000)
    refused = Admission(Policy(), LIMITS, room).judge(prompt(8))
    assert reason_of(refused) == Reason.TOO_LARGE


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"min_tokens": 0}, "--min-tokens must be >= 1"),
        ({"min_tokens": 5, "max_tokens": 4}, "--max-tokens 4 is less than --min-tokens 5"),
        ({"min_trained": -1}, "--min-trained must be >= 0"),
        ({"min_trained": 5, "max_tokens": 4}, "--max-tokens 4 is less than --min-trained 5"),
    ],
)
def test_bounds_that_no_prompt_can_meet_are_refused(values: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Policy(**values)

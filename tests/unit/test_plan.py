"""What goes on the wire, and what it costs at most."""

from __future__ import annotations

import numpy as np
import orjson
import pytest
from helpers import LAYOUT, Ids, make_header, prompt_of
from hypothesis import given
from hypothesis import strategies as st

from extractor.core.admission import refusal
from extractor.core.request import Limits, Request, dump_bytes
from extractor.core.rids import make_rid, rid_prefix
from manifest.states import Reason
from server_patch.dump_format import StateLayout, encode_header

LIMITS = Limits(max_prompt_tokens=10, vocab_size=100, chunk_tokens=4)
PAGE_BYTES = 4096

layouts = st.builds(
    StateLayout,
    boundaries=st.sets(st.integers(0, 80), min_size=1, max_size=6).map(
        lambda found: tuple(sorted(found))
    ),
    hidden_size=st.integers(1, 8192),
    dtype=st.sampled_from(["BF16", "F16", "F32"]),
    last_kind=st.sampled_from(["post", "pre", "both"]),
)


@given(layouts, st.integers(1, 5000), st.integers(1, 3000), st.integers(1, 3000))
def test_dumps_never_take_more_than_was_planned(
    layout: StateLayout, num_tokens: int, chunk_tokens: int, first: int
) -> None:
    """The first chunk may be shared, so it may be of any size; tmpfs rounds to pages."""
    limits = Limits(max_prompt_tokens=10**6, vocab_size=10, chunk_tokens=chunk_tokens)
    used, start = 0, 0
    step = min(first, chunk_tokens, num_tokens)
    while start < num_tokens:
        rows = min(step, num_tokens - start)
        header = make_header(
            rid=make_rid(run_id="f" * 8, session_id="probe" + "f" * 8, ordinal=10**9, attempt=999),
            start=start, rows=rows, boundaries=layout.boundaries, hidden_size=layout.hidden_size,
            dtype=layout.dtype, last_kind=layout.last_kind, boot_id="b" * 64, counter=10**9,
        )  # fmt: skip
        size = len(encode_header(header)) + rows * layout.bytes_per_token
        used += -(-size // PAGE_BYTES) * PAGE_BYTES
        start += rows
        step = chunk_tokens
    assert used <= dump_bytes(num_tokens, layout, limits)


def test_a_request_carries_ids_only_and_isolates_itself() -> None:
    prompt = prompt_of(Ids(ids=(5, 6, 7), mask=(0, 1, 1)))
    body = orjson.loads(Request(rid="xtr-r-s-1-1", prompt=prompt).to_json())
    assert body["input_ids"] == [5, 6, 7]
    assert all(type(token) is int for token in body["input_ids"])
    assert body["rid"] == body["extra_key"] == "xtr-r-s-1-1"
    assert body["sampling_params"] == {"max_new_tokens": 1, "temperature": 0}
    assert "text" not in body


def test_rids_differ_by_run_session_prompt_and_attempt() -> None:
    names = {
        make_rid(run_id=run, session_id=session, ordinal=ordinal, attempt=attempt)
        for run in "ab"
        for session in "cd"
        for ordinal in (1, 11)
        for attempt in (1, 11)
    }
    assert len(names) == 16
    assert sum(name.startswith(rid_prefix("a")) for name in names) == 8


@pytest.mark.parametrize(
    ("ids", "reason", "detail"),
    [
        ([1] * 10, None, ""),
        ([1] * 11, Reason.TOO_LONG, "11 tokens, the server takes 10"),
        ([0, 99], None, ""),
        ([0, 100], Reason.TOKEN_OUT_OF_RANGE, "token 1 is 100, the vocabulary has 100"),
        ([-1, 5], Reason.TOKEN_OUT_OF_RANGE, "token 0 is -1, the vocabulary has 100"),
        ([2**31 - 1], Reason.TOKEN_OUT_OF_RANGE, "token 0 is 2147483647, the vocabulary has 100"),
    ],
)
def test_what_would_kill_or_be_cut_by_the_server_is_refused(
    ids: list[int], reason: Reason | None, detail: str
) -> None:
    prompt = prompt_of(Ids(ids=tuple(ids), mask=(0,) * len(ids)))
    found = refusal(prompt, LIMITS)
    assert (found.reason if found else None) is reason
    assert (found.detail if found else "") == detail


def test_bytes_per_token_are_those_of_the_states_and_the_id() -> None:
    assert LAYOUT.bytes_per_token == (3 + 1) * 8 * 2 + 4
    assert np.dtype(np.int32).itemsize == 4

"""Each refusal of SGLang is classified: the prompt's fault, the server's, or neither's."""

from __future__ import annotations

import pytest

from extractor.servers.refusals import abort_failure, http_failure
from manifest.states import Reason

#: The message of SGLang 0.5.11 to 0.5.23.
DUPLICATE = "Duplicate request ID detected: xtr-ab12-c0ffee-42-1"
HUNG_UP = "Request is disconnected from the client side (type 1). Abort request obj.rid='xtr-1'"
QUEUE_FULL = "The request queue is full."
OUT_OF_MEMORY = (
    "Out of memory even after retracting all other requests in the decode batch. Aborting the "
    "last request."
)
TOO_LONG = "The input (600 tokens) is longer than the model's context length (512 tokens)."


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (400, TOO_LONG, "permanent"),
        (400, "Request prompt exceeds the KV memory budget: input_len=600.", "permanent"),
        (413, "", "permanent"),
        (422, "", "permanent"),
        (400, DUPLICATE, "copy"),
        (400, DUPLICATE.upper(), "copy"),
        (500, f"upstream said: {DUPLICATE}", "copy"),  # a gateway's own status
        (400, HUNG_UP, "busy"),
        (429, "", "busy"),
        (503, QUEUE_FULL, "busy"),
        (503, "The request is aborted by a higher priority request.", "busy"),
        (503, "Request waiting timeout reached.", "busy"),
        (503, "Request running timeout reached.", "busy"),
        (500, OUT_OF_MEMORY, "server"),
        (500, "boom", "server"),
        (501, "", "server"),
        (302, "", "server"),
        (204, "", "server"),
        (401, "Unauthorized", "server"),  # not about a particular prompt
        (403, "", "server"),
        (404, "Not Found", "server"),
        (405, "", "server"),
        (502, "Bad Gateway", "transport"),
        (504, "Gateway Timeout", "server"),
        (408, "", "server"),
    ],
)
def test_each_refusal_blames_the_prompt_the_server_or_neither(
    status: int, message: str, kind: str
) -> None:
    failure = http_failure(status, message)
    assert failure.is_permanent is (kind == "permanent")
    assert failure.is_busy is (kind == "busy")
    assert failure.is_copy is (kind == "copy")
    assert failure.is_transport is (kind == "transport")
    assert failure.is_not_counted is (kind in ("busy", "copy", "transport"))
    assert failure.is_unserved is (kind in ("server", "copy", "transport"))
    assert (failure.reason is Reason.REJECTED) is (kind == "permanent")
    assert failure.detail == f"HTTP {status}: {message}"


@pytest.mark.parametrize("status", [408, 502, 504])
def test_after_a_gateway_gave_up_the_server_may_still_process_the_request(status: int) -> None:
    assert http_failure(status, "").is_unanswered


@pytest.mark.parametrize(
    ("status", "message", "is_busy", "is_permanent"),
    [
        (None, "Abort in waiting queue", True, False),
        (None, "Aborted", True, False),
        (None, "Aborted by AbortReq.", True, False),
        (503, QUEUE_FULL, True, False),
        (429, "", True, False),
        (500, OUT_OF_MEMORY, False, False),
        (400, "Grammar", False, True),
    ],
)
def test_an_abort_is_classified_by_status_and_means_busy_without_one(
    status: int | None, message: str, is_busy: bool, is_permanent: bool
) -> None:
    failure = abort_failure(status, message)
    assert (failure.is_busy, failure.is_permanent) == (is_busy, is_permanent)
    assert failure.detail.startswith(f"aborted by the server: {message}")

"""Each refusal of SGLang is classified: the prompt's fault, the server's, or neither's."""

from __future__ import annotations

import pytest

from extractor.core.failure import FailureKind
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
        (400, TOO_LONG, FailureKind.PERMANENT),
        (400, "Request prompt exceeds the KV memory budget: input_len=600.", FailureKind.PERMANENT),
        (413, "", FailureKind.PERMANENT),
        (422, "", FailureKind.PERMANENT),
        (400, DUPLICATE, FailureKind.COPY),
        (400, DUPLICATE.upper(), FailureKind.COPY),
        (500, f"upstream said: {DUPLICATE}", FailureKind.COPY),  # a gateway's own status
        (400, HUNG_UP, FailureKind.HUNG_UP),
        (429, "", FailureKind.BUSY),
        (503, QUEUE_FULL, FailureKind.BUSY),
        (503, "The request is aborted by a higher priority request.", FailureKind.BUSY),
        (503, "Request waiting timeout reached.", FailureKind.BUSY),
        (503, "Request running timeout reached.", FailureKind.BUSY),
        (500, OUT_OF_MEMORY, FailureKind.SERVER),
        (500, "boom", FailureKind.SERVER),
        (501, "", FailureKind.SERVER),
        (302, "", FailureKind.SERVER),
        (204, "", FailureKind.SERVER),
        (401, "Unauthorized", FailureKind.SERVER),  # not about a particular prompt
        (403, "", FailureKind.SERVER),
        (404, "Not Found", FailureKind.SERVER),
        (405, "", FailureKind.SERVER),
        (502, "Bad Gateway", FailureKind.BROKEN),
        (504, "Gateway Timeout", FailureKind.SILENT),
        (408, "", FailureKind.SILENT),
    ],
)
def test_each_refusal_blames_the_prompt_the_server_or_neither(
    status: int, message: str, kind: FailureKind
) -> None:
    failure = http_failure(status, message)
    assert failure.kind is kind
    assert (failure.reason is Reason.REJECTED) is (kind is FailureKind.PERMANENT)
    assert failure.detail == f"HTTP {status}: {message}"


@pytest.mark.parametrize("status", [408, 502, 504])
def test_after_a_gateway_gave_up_the_server_may_still_process_the_request(status: int) -> None:
    assert http_failure(status, "").kind.may_be_processed


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (None, "Abort in waiting queue", FailureKind.BUSY),
        (None, "Aborted", FailureKind.BUSY),
        (None, "Aborted by AbortReq.", FailureKind.BUSY),
        (503, QUEUE_FULL, FailureKind.BUSY),
        (429, "", FailureKind.BUSY),
        (500, OUT_OF_MEMORY, FailureKind.SERVER),
        (400, "Grammar", FailureKind.PERMANENT),
    ],
)
def test_an_abort_is_classified_by_status_and_means_busy_without_one(
    status: int | None, message: str, kind: FailureKind
) -> None:
    failure = abort_failure(status, message)
    assert failure.kind is kind
    assert failure.detail.startswith(f"aborted by the server: {message}")

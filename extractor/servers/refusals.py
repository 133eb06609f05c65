"""Classifies the replies of a server that did not serve a request, in one table. Pure.

SGLang 0.5.11 to 0.5.23 report a refusal in three forms:

- 400 `{"error": {"message": ...}}`: the server rejects the prompt (too long, out of vocabulary).
- 500 and 503 `{"object": "error", "message": ..., "code": ...}`: the server aborted the request;
  its scheduler chose the status.
- 200 with `meta_info.finish_reason.type` "abort" and an optional status. Without a status, an
  outside event ended the request: /abort_request for all, a pause, or a weight update. A request
  that was aborted in the queue has no `prompt_tokens`.

| reason of an abort | status | meaning |
|---|---|---|
| The request queue is full. (--max-queued-requests) | 503 | busy |
| The request is aborted by a higher priority request. | 503 | busy |
| Request waiting timeout reached. (SGLANG_REQ_WAITING_TIMEOUT) | 503 | busy |
| Request running timeout reached. (SGLANG_REQ_RUNNING_TIMEOUT) | 503 | busy |
| Retracted under decode memory pressure without a KV backup. Retry later. | 503 | busy |
| Abort in waiting queue; Aborted; Aborted by AbortReq. | none | busy |
| Out of memory even after retracting all other requests | 500 | the server's |
| Retraction host KV pool exhausted. | 500 | the server's |
| Request prompt exceeds the KV memory budget; longer than the model's context length | 400 | the prompt's |

Gateways add statuses of their own. If a gateway sends a request twice, the second copy gets 400
"Duplicate request ID detected"; if it hangs up, the request gets 400 "Request is disconnected from
the client side". Neither is the prompt's fault.
"""  # noqa: E501 - the table

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from extractor.core.failure import Failure, FailureKind
from manifest.states import Reason

#: Part of the message, in lower case -> its meaning. Takes precedence over the status.
BY_MESSAGE: Final[Mapping[str, FailureKind]] = {
    "duplicate request id": FailureKind.COPY,
    "disconnected from the client side": FailureKind.HUNG_UP,
}
#: Status -> its meaning. All others are the server's fault, including 401 to 407: an expired API
#: key or a changed address fails every prompt and is no reason to reject one. 408 and 504: a
#: gateway timed out; 502: it found no server, or lost the connection to it.
BY_STATUS: Final[Mapping[int, FailureKind]] = {
    400: FailureKind.PERMANENT,
    408: FailureKind.SILENT,
    413: FailureKind.PERMANENT,
    422: FailureKind.PERMANENT,
    429: FailureKind.BUSY,
    502: FailureKind.BROKEN,
    503: FailureKind.BUSY,
    504: FailureKind.SILENT,
}


def http_failure(status: int, message: str) -> Failure:
    """Classify an HTTP reply other than 200.

    >>> http_failure(400, "Duplicate request ID detected: xtr-ab12-c0ffee-42-1").kind.name
    'COPY'
    >>> http_failure(503, "The request queue is full.").detail
    'HTTP 503: The request queue is full.'
    """
    return _failure(_kind(status, message), f"HTTP {status}: {message}")


def abort_failure(status: int | None, message: str) -> Failure:
    """Classify a reply with the finish reason "abort".

    >>> abort_failure(None, "Abort in waiting queue").kind.name
    'BUSY'
    """
    kind = FailureKind.BUSY if status is None else _kind(status, message)
    code = "" if status is None else f" ({status})"
    return _failure(kind, f"aborted by the server: {message}{code}")


def _kind(status: int, message: str) -> FailureKind:
    lowered = message.lower()
    for part, kind in BY_MESSAGE.items():
        if part in lowered:
            return kind
    return BY_STATUS.get(status, FailureKind.SERVER)


def _failure(kind: FailureKind, detail: str) -> Failure:
    reason = Reason.REJECTED if kind is FailureKind.PERMANENT else Reason.SERVER_ERROR
    return Failure(reason=reason, detail=detail, kind=kind)

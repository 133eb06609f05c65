"""From a prompt to what goes on the wire, and what it will cost. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import orjson

from extractor.core.config import Layout
from manifest.states import Reason
from prompts.types import Prompt

RID_PREFIX = "xtr-"
#: How the session of a probe's rid begins.
PROBE_SESSION = "probe"
#: A piece's file beyond its rows: the header, and the last tmpfs page it begins.
PIECE_OVERHEAD_BYTES = 8192


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the server takes, as read from it at preflight."""

    max_prompt_tokens: int  # longest prompt that is prefilled whole
    vocab_size: int
    chunk_tokens: int  # most rows of one piece; the prompt's length when prefill is not chunked

    @classmethod
    def strictest(cls, limits: Sequence[Limits]) -> Limits:
        """What each of several servers takes.

        >>> one = Limits(max_prompt_tokens=100, vocab_size=10, chunk_tokens=32)
        >>> other = Limits(max_prompt_tokens=90, vocab_size=10, chunk_tokens=64)
        >>> Limits.strictest([one, other])
        Limits(max_prompt_tokens=90, vocab_size=10, chunk_tokens=32)
        """
        return cls(
            max_prompt_tokens=min(limit.max_prompt_tokens for limit in limits),
            vocab_size=min(limit.vocab_size for limit in limits),
            chunk_tokens=min(limit.chunk_tokens for limit in limits),
        )


@dataclass(frozen=True, kw_only=True)
class Request:
    """One attempt to send one prompt."""

    rid: str
    prompt: Prompt

    def to_json(self) -> bytes:
        """The body of POST /generate. Ids only, so that nothing is tokenised twice.

        `extra_key` isolates the attempt in the prefix cache: a row served from the cache would
        have no state. SGLang computes one token at least, and a prompt's own token is free.
        """
        document = {
            "rid": self.rid,
            "input_ids": np.ascontiguousarray(self.prompt.input_ids),
            "extra_key": self.rid,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "stream": False,
        }
        return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a prompt must not be sent."""

    reason: Reason
    detail: str


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


def refusal(prompt: Prompt, limits: Limits) -> Refusal | None:
    """Why the server must not get this prompt; None if it may.

    An id outside the vocabulary indexes the embedding without a check and kills the server; a
    prompt over the limit is cut silently by some configurations.
    """
    if prompt.num_tokens > limits.max_prompt_tokens:
        return Refusal(
            reason=Reason.TOO_LONG,
            detail=f"{prompt.num_tokens} tokens, the server takes {limits.max_prompt_tokens}",
        )
    outside = (prompt.input_ids < 0) | (prompt.input_ids >= limits.vocab_size)
    if outside.any():
        position = int(outside.argmax())
        return Refusal(
            reason=Reason.TOKEN_OUT_OF_RANGE,
            detail=f"token {position} is {int(prompt.input_ids[position])}, "
            f"the vocabulary has {limits.vocab_size}",
        )
    return None


def dump_bytes(num_tokens: int, layout: Layout, limits: Limits) -> int:
    """Most bytes that a prompt's dumps can take under the dump root.

    Chunks are shared between requests, so a prompt may be cut once more than its length asks for.

    >>> layout = Layout(boundaries=(1, 2, 3), hidden_size=4096, dtype="BF16", last_kind="post")
    >>> limits = Limits(max_prompt_tokens=10**6, vocab_size=10, chunk_tokens=8192)
    >>> dump_bytes(8192, layout, limits)  # 8192 rows x (4 x 4096 x 2 + 4) bytes, 3 pieces
    268492800
    """
    pieces = num_tokens // limits.chunk_tokens + 2
    return num_tokens * layout.dump_bytes_per_token + pieces * PIECE_OVERHEAD_BYTES

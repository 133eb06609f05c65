"""The body of one request, the limits of a server, and the bytes a prompt will take. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import orjson

from prompts.types import Prompt
from server_patch.dump_format import StateLayout

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


def dump_bytes(num_tokens: int, layout: StateLayout, limits: Limits) -> int:
    """Most bytes that a prompt's dumps can take under the dump root.

    Chunks are shared between requests, so a prompt may be cut once more than its length asks for.

    >>> layout = StateLayout(boundaries=(1, 2, 3), hidden_size=4096, dtype="BF16", last_kind="post")
    >>> limits = Limits(max_prompt_tokens=10**6, vocab_size=10, chunk_tokens=8192)
    >>> dump_bytes(8192, layout, limits)  # 8192 rows x (4 x 4096 x 2 + 4) bytes, 3 pieces
    268492800
    """
    pieces = num_tokens // limits.chunk_tokens + 2
    return num_tokens * layout.bytes_per_token + pieces * PIECE_OVERHEAD_BYTES

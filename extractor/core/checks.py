"""The proofs: pure functions from what was promised and what is there to what is wrong."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from extractor.core.failure import Failure, FailureKind
from manifest.states import Reason
from server_patch.dump_format import ITEM_BYTES, DumpHeader, Ready, StateLayout

#: Exponent bits of each dtype as unsigned integers: all ones means NaN or infinity.
_EXPONENT_BITS: dict[str, tuple[type[np.unsignedinteger], type[np.signedinteger], int]] = {
    "BF16": (np.uint16, np.int16, 0x7F80),
    "F16": (np.uint16, np.int16, 0x7C00),
    "F32": (np.uint32, np.int32, 0x7F800000),
}


@dataclass(frozen=True, kw_only=True)
class ReplyFacts:
    """What the server says of a request it answered."""

    prompt_tokens: int
    cached_tokens: int
    weight_version: str | None = None  # the engine's label for the weights that it ran on


def check_reply(facts: ReplyFacts, *, num_tokens: int) -> Failure | None:
    """Whether the server prefilled the whole prompt, computing every row."""
    if facts.prompt_tokens != num_tokens:
        return Failure(
            reason=Reason.TRUNCATED,
            detail=f"sent {num_tokens} tokens, the server prefilled {facts.prompt_tokens}",
            kind=FailureKind.PERMANENT,
        )
    if facts.cached_tokens:
        return Failure(
            reason=Reason.CACHED,
            detail=f"{facts.cached_tokens} of {num_tokens} tokens came from the prefix cache; "
            "start the server with --disable-radix-cache",
        )
    return None


def check_header(header: DumpHeader, ready: Ready) -> Failure | None:
    """Whether a dump has the layout that its writer announced."""
    for name, found, announced in (
        ("boot_id", header.boot_id, ready.boot_id),
        ("rank", header.rank, ready.rank),
        ("boundaries", header.layout.boundaries, ready.layout.boundaries),
        ("hidden_size", header.layout.hidden_size, ready.layout.hidden_size),
        ("dtype", header.layout.dtype, ready.layout.dtype),
        ("last_kind", header.layout.last_kind, ready.layout.last_kind),
    ):
        if found != announced:
            return Failure(
                reason=Reason.WRONG_LAYOUT,
                detail=f"dump {header.counter}: {name} is {found!r}, READY.json says {announced!r}",
                kind=FailureKind.PERMANENT,
            )
    return None


def check_ids(
    expected: npt.NDArray[np.int32], found: npt.NDArray[np.int32], *, start: int
) -> Failure | None:
    """Whether a piece holds the tokens that were sent: element by element.

    `expected`: int32 [N], the whole prompt; `found`: int32 [rows], from row `start` on.
    """
    differs = expected[start : start + len(found)] != found
    if not differs.any():
        return None
    at = int(differs.argmax())
    return Failure(
        reason=Reason.WRONG_TOKENS,
        detail=f"row {start + at} holds token {int(found[at])}, "
        f"sent was {int(expected[start + at])}",
    )


def first_nonfinite(data: memoryview, dtype: str) -> int | None:
    """Index of the first NaN or infinity among packed values of `dtype`; None if all are finite.

    bfloat16 has no numpy type, so the values are looked at as integers: a float is not finite
    exactly when all its exponent bits are ones (IEEE 754).
    """
    unsigned, signed, exponent = _EXPONENT_BITS[dtype]
    values = np.frombuffer(data, dtype=unsigned)
    if not values.size:
        return None
    # Of positive values the largest as signed integers, of negative ones as unsigned: two passes
    # without a temporary, at half as much again the speed of masking.
    sign_bit = 1 << 8 * values.itemsize - 1
    if values.view(signed).max() < exponent and values.max() < sign_bit | exponent:
        return None
    return int((np.bitwise_and(values, unsigned(exponent)) == exponent).argmax())


def check_finite(
    block: memoryview, *, at: int, name: str, start: int, layout: StateLayout
) -> Failure | None:
    """Whether all values of a part of a state tensor are finite.

    `at`: bytes of the tensor before the part; `start`: the tensor's first row in the prompt.
    """
    found = first_nonfinite(block, layout.dtype)
    if found is None:
        return None
    row, column = divmod(at // ITEM_BYTES[layout.dtype] + found, layout.state_width(name))
    where = f"row {start + row}"
    if name == "aux":
        where += f", boundary {layout.boundaries[column // layout.hidden_size]}"
    return Failure(reason=Reason.NONFINITE, detail=f"{name} holds NaN or infinity at {where}")

"""The canary: a prompt whose states a data set keeps and every server start computes again.

A fingerprint proves that the weights are the same bytes. The canary proves that the weights, and
everything else the fingerprint and the recorded settings miss, still give the same states. Pure.

Two correct computations of the same states differ by rounding, and the difference grows with the
number of layers. The error of a token is |a - b| / |b|, with Euclidean norms over the hidden size.
The error of a state is the 80th percentile over the canary's tokens. The maximum is too strict: a
rounding error can route a single token to another expert of a mixture. The median is too lenient:
it hides a change that affects later tokens only, such as another KV cache dtype.
docs/provenance.md has the measurements behind the tolerances.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from server_patch.dump_format import DumpHeader, decode_header, encode_header

NUM_TOKENS: Final = 24
RID: Final = "canary"
#: Largest accepted error of any state, by the dtype of the states.
TOLERANCES: Final[Mapping[str, float]] = {"F32": 0.002, "F16": 0.02, "BF16": 0.08}
_QUANTILE: Final = 0.8  # of the tokens' errors
#: Below this, ids are ordinary text in every vocabulary; multimodal placeholders come later.
_COMMON_IDS: Final = 20_000
_FIRST_ID: Final = 100
_STEP: Final = 7919  # a prime, so that ids do not repeat


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The difference between two canaries."""

    error: float  # the largest error of any state
    state: str  # the state with that error, such as "h[16]" or "last"
    tolerance: float

    @property
    def is_same(self) -> bool:
        return self.error <= self.tolerance

    def to_text(self) -> str:
        return (
            f"{self.state} differs by {self.error:.2g} from the data set's canary "
            f"(tolerance {self.tolerance:g})"
        )


def canary_ids(*, vocab_size: int, max_tokens: int) -> npt.NDArray[np.int32]:
    """The tokens of a new canary, int32 [at most NUM_TOKENS]; a function of the arguments alone."""
    numbers = np.arange(1, min(NUM_TOKENS, max_tokens) + 1, dtype=np.int64) * _STEP
    span = min(vocab_size, _COMMON_IDS)
    if span <= 2 * _FIRST_ID:
        return (numbers % span).astype(np.int32)
    return (_FIRST_ID + numbers % (span - _FIRST_ID)).astype(np.int32)


def encode_canary(header: DumpHeader, tensors: Mapping[str, bytes]) -> bytes:
    """Encode a canary as the manifest keeps it: one dump of all its rows.

    `header`: the header of any of its pieces. `tensors`: name -> bytes of all rows, including
    `input_ids`.
    """
    rows = len(tensors["input_ids"]) // 4
    whole = replace(header, rid=RID, start=0, rows=rows, counter=0)
    names = (*whole.layout.state_names, "input_ids")
    return encode_header(whole) + b"".join(tensors[name] for name in names)


def ids_of(canary: bytes) -> npt.NDArray[np.int32]:
    """The tokens of an encoded canary, int32 [N]. Raises DumpFormatError."""
    span = decode_header(canary, file_bytes=len(canary)).tensors["input_ids"]
    return np.frombuffer(canary[span.begin : span.end], dtype="<i4").astype(np.int32)


def compare(reference: bytes, found: bytes) -> Comparison:
    """Compare two encoded canaries. Raises DumpFormatError.

    Tokens whose reference state is not finite are left out. The error is infinite if the layouts
    differ, or if `found` alone has a state that is not finite.
    """
    dtype = decode_header(reference, file_bytes=len(reference)).header.layout.dtype
    before, now = _states(reference), _states(found)
    errors = {
        name: _error(before[name], now[name])
        for name in before
        if name in now and now[name].shape == before[name].shape
    }
    if len(errors) < max(len(before), len(now)):
        return Comparison(error=float("inf"), state="layout", tolerance=TOLERANCES[dtype])
    worst = max(errors, key=errors.__getitem__)
    return Comparison(error=errors[worst], state=worst, tolerance=TOLERANCES[dtype])


def _states(canary: bytes) -> dict[str, npt.NDArray[np.float32]]:
    """Name -> float32 [N, H] of each state."""
    dump = decode_header(canary, file_bytes=len(canary))
    states: dict[str, npt.NDArray[np.float32]] = {}
    for name, span in dump.tensors.items():
        if name == "input_ids":
            continue
        values = _floats(canary[span.begin : span.end], span.dtype).reshape(span.shape)
        if name != "aux":
            states[name] = values
            continue
        for boundary, part in zip(
            dump.header.layout.boundaries,
            np.split(values, len(dump.header.layout.boundaries), axis=1),
            strict=True,
        ):
            states[f"h[{boundary}]"] = part
    return states


def _floats(data: bytes, dtype: str) -> npt.NDArray[Any]:
    match dtype:
        case "F32":
            return np.frombuffer(data, dtype="<f4")
        case "F16":
            return np.frombuffer(data, dtype="<f2").astype(np.float32)
        case _:  # bfloat16 is the upper half of float32
            return (np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16).view(np.float32)


def _error(before: npt.NDArray[np.float32], now: npt.NDArray[np.float32]) -> float:
    rows = np.isfinite(before).all(axis=1)
    before, now = before[rows].astype(np.float64), now[rows].astype(np.float64)
    if not len(before):
        return 0.0
    if not np.isfinite(now).all():
        return float("inf")
    distance = np.linalg.norm(now - before, axis=1)
    size = np.linalg.norm(before, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        errors = np.where(distance == 0, 0.0, distance / size)
    return float(np.quantile(errors, _QUANTILE, method="higher"))

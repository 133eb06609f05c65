"""The shape of the states of one token. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from extractor.core.errors import CorruptData
from extractor.core.humanize import quoted
from server_patch.dump_format import LAST_TENSORS, STATE_DTYPES, Ready, bytes_per_token

MAX_HIDDEN_SIZE = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Shape of the states of one token: the same for every sample of a data set."""

    boundaries: tuple[int, ...]  # ascending boundary indices
    hidden_size: int
    dtype: str  # safetensors name: BF16, F16 or F32
    last_kind: str  # post, pre or both

    @classmethod
    def of(cls, ready: Ready) -> Layout:
        """The layout of the states that a writer announced."""
        return cls(
            boundaries=ready.capture.boundaries,
            hidden_size=ready.model.hidden_size,
            dtype=ready.model.dtype,
            last_kind=ready.capture.last_kind,
        )

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the state tensors, in file order."""
        return ("aux", *LAST_TENSORS[self.last_kind])

    @cached_property
    def dump_bytes_per_token(self) -> int:
        return bytes_per_token(
            num_boundaries=len(self.boundaries),
            hidden_size=self.hidden_size,
            dtype=self.dtype,
            last_kind=self.last_kind,
        )

    def require_sound(self) -> None:
        """Raise CorruptData if no model can have such states."""
        ascends = list(self.boundaries) == sorted(set(self.boundaries))
        if not self.boundaries or self.boundaries[0] < 0 or not ascends:
            raise CorruptData(f"boundaries must ascend and not repeat: {quoted(self.boundaries)}")
        if not 1 <= self.hidden_size <= MAX_HIDDEN_SIZE:
            raise CorruptData(f"hidden_size must be 1 to {MAX_HIDDEN_SIZE}, is {self.hidden_size}")
        if self.dtype not in STATE_DTYPES:
            raise CorruptData(f"dtype must be one of {STATE_DTYPES}, is {quoted(self.dtype)}")
        if self.last_kind not in LAST_TENSORS:
            raise CorruptData(f"last_kind must be post, pre or both, is {quoted(self.last_kind)}")

    def state_width(self, name: str) -> int:
        """Elements per row of one state tensor."""
        return self.hidden_size * (len(self.boundaries) if name == "aux" else 1)

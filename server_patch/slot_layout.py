"""The layout of the rows of one forward in a staging slot. Pure; no tensors.

```
| aux: rows x k*H | pad | last: rows x H | pad | last_pre: rows x H | pad | input_ids: rows |
```

Sections follow `dump_format.TENSOR_ORDER` and begin on multiples of `SLOT_ALIGNMENT`. Within a
section rows are packed, so a request's rows are one run of bytes per section, and a dump is written
as its header and those runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Final, NamedTuple

from server_patch.dump_format import ITEM_BYTES, StateLayout

#: Bytes; enough for a typed view of any element and for wide device copies.
SLOT_ALIGNMENT: Final = 256


class Section(NamedTuple):
    """One tensor's rows within a slot."""

    name: str
    dtype: str  # safetensors name
    width: int  # elements per row
    offset: int  # bytes from the start of the slot
    row_bytes: int


@dataclass(frozen=True)
class SlotLayout:
    """The places of tensors in a slot, for any number of rows."""

    states: StateLayout

    @cached_property
    def _columns(self) -> list[tuple[str, str, int, int]]:
        """(name, dtype, elements per row, bytes per row), in file order."""
        columns = []
        for name, (dtype, (_, *widths)) in self.states.tensor_shapes(1).items():
            width = prod(widths)
            columns.append((name, dtype, width, width * ITEM_BYTES[dtype]))
        return columns

    def sections(self, rows: int) -> list[Section]:
        """Places of the tensors of `rows` rows, in file order."""
        sections = []
        offset = 0
        for name, dtype, width, row_bytes in self._columns:
            sections.append(
                Section(name=name, dtype=dtype, width=width, offset=offset, row_bytes=row_bytes)
            )
            offset += rows * row_bytes
            offset += -offset % SLOT_ALIGNMENT
        return sections

    def size_bytes(self, rows: int) -> int:
        """Bytes that `rows` rows take in a slot."""
        last = self.sections(rows)[-1]
        return last.offset + rows * last.row_bytes

    def rows_in(self, size_bytes: int) -> int:
        """Maximum number of rows that fit in `size_bytes`; 0 if not even one does."""
        padding = (len(self._columns) - 1) * SLOT_ALIGNMENT
        return max(0, (size_bytes - padding) // self.states.bytes_per_token)

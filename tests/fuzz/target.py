"""One kind of input: how it is made, and what of the product reads it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

#: Makes one input from its source of chance, and hands it to the product.
Run = Callable[[random.Random], object]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A kind of input. `count` inputs are tried in CI."""

    name: str
    count: int
    #: Makes sound files in an empty directory, once in a process.
    prepare: Callable[[Path], Run]


def chance_of(target: Target, seed: int) -> random.Random:
    """The source of chance of one input; the same in every process."""
    return random.Random(f"{target.name} {seed}")

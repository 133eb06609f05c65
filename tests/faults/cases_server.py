"""Full, failing and read-only disks; dumps and shards that somebody damages."""

from __future__ import annotations

from collections.abc import Iterator

from faults.cases import Case


def cases() -> Iterator[Case]:
    return iter(())

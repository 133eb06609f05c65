"""What the stand-in `collectives` noted of a server's forwards."""

from __future__ import annotations

import json
from typing import NamedTuple

from plugin.serving import Serving
from plugin.values import make_ids


class Forward(NamedTuple):
    """One kind of forward, whichever rank ran it and how often."""

    mode: str
    rows: int
    operations: tuple[tuple[str, int], ...]  # of torch.distributed, and how often each was called


def forwards_of(server: Serving) -> set[Forward]:
    """The forwards that six requests give, one after the other, half of them seen before."""
    logs = list(server.root.with_suffix(".collectives").glob("*.jsonl"))
    before = {log: len(log.read_text().splitlines()) for log in logs}
    for number in range(6):
        ids = make_ids(400 + number // 2, 20 + 9 * (number // 2))
        sampling = {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}
        rid = f"xtr-forwards-{number}"
        server.generate(rid, ids, sampling_params=sampling, extra_key="forwards")
    seen = set()
    for log in logs:
        for line in log.read_text().splitlines()[before[log] :]:
            mode, rows, operations = json.loads(line)
            seen.add(Forward(mode, rows, tuple(sorted(operations.items()))))
    return seen

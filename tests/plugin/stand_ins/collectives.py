"""Notes every collective operation of every forward: an SGLang plugin for the tests' servers.

One line per forward of each rank in `$RIG_COLLECTIVES/<pid>.jsonl`: the batch's mode, its rows, and
how often each operation of torch.distributed was called from its begin to its end.
"""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Methods of a process group: what every function of torch.distributed ends in.
OPERATIONS = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)


def hooks() -> None:
    import torch.distributed as dist
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    log = Path(os.environ["RIG_COLLECTIVES"]) / f"{os.getpid()}.jsonl"
    counts: Counter[str] = Counter()

    def counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return method(*args, **kwargs)

        return wrapper

    for name in filter(functools.partial(hasattr, dist.ProcessGroup), OPERATIONS):
        setattr(dist.ProcessGroup, name, counted(name, getattr(dist.ProcessGroup, name)))

    def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        batch = kwargs["forward_batch"] if "forward_batch" in kwargs else args[1]
        what = [batch.forward_mode.name, len(batch.input_ids)]
        counts.clear()
        result = original(*args, **kwargs)
        with log.open("a") as lines:
            lines.write(json.dumps([*what, dict(sorted(counts.items()))]) + "\n")
        return result

    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner.forward", forward, HookType.AROUND
    )

"""Breaks the plugin from outside, when a test says so: an SGLang plugin for the tests' servers.

While a file in the folder `$RIG_FAULTS` is named like one of `POINTS`, each call of that function
raises. While one is named `slow`, each forward of ours takes a while, so that a test can step in.
"""

from __future__ import annotations

import functools
import os
import pkgutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Everything of ours that runs while the engine waits for it, and the thread that sends the jobs.
POINTS = (
    "server_patch.sglang_api.is_prefill",
    "server_patch.sglang_api.read_batch",
    "server_patch.sglang_api.RequestIds",
    "server_patch.norm_probe.NormProbe.take",
    "server_patch.capture.States",
    "server_patch.tap.Tap.take",
    "server_patch.tap.plan_spans",
    "server_patch.tap.split_spans",
    "server_patch.staging.States.check",
    "server_patch.staging.CpuStager.stage",
    "server_patch.staging.CpuStager.wait",
    "server_patch.writer_pool._split",
    "server_patch.writer_protocol.Job.encode",
)
SLOW = "slow"
#: Where the pause goes: once in each forward that holds a request of ours.
_SLOWED = "server_patch.staging.CpuStager.stage"
_PAUSE_S = 0.05


def hooks() -> None:
    folder = Path(os.environ["RIG_FAULTS"])
    for point in POINTS:
        owner_name, _, name = point.rpartition(".")
        owner = pkgutil.resolve_name(owner_name)
        setattr(owner, name, _breakable(getattr(owner, name), folder, point))


def _breakable(function: Callable[..., Any], folder: Path, point: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if (folder / point).exists():
            raise RuntimeError(f"injected at {point}")
        if point == _SLOWED and (folder / SLOW).exists():
            time.sleep(_PAUSE_S)
        return function(*args, **kwargs)

    return wrapper

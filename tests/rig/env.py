"""What makes SGLang run on a plain CPU: environment variables and server arguments, in one place.

The demo hands them to ``extractor serve``; the tests hand them to SGLang itself through
:mod:`rig.server`. Nothing here says anything about extraction.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

# The value of SGLANG_PLUGINS for a server without our plugin: the shim's own hook and nothing else.
RIG_PLUGINS = "cpu_mla"

# More threads than this buy nothing on models of this size.
_MAX_THREADS = 8

SERVER_ARGS: tuple[str, ...] = (
    "--device", "cpu",
    "--attention-backend", "torch_native",
    "--sampling-backend", "pytorch",
    "--mem-fraction-static", "0.5",
    # Tokens of KV cache: enough for a full batch, and 0.4 GB for the model of the demo in bfloat16.
    "--max-total-tokens", "16384",
    "--max-running-requests", "64",
    # The fastest of 512, 1024, 2048 and 8192 for chat prompts on two cores (about 900 tokens/s).
    "--chunked-prefill-size", "2048",
)  # fmt: skip
"""Arguments of ``sglang.launch_server`` besides the model, address and dtype."""


def environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return `base` (default: this process's environment) with what a CPU server needs added."""
    env = dict(os.environ if base is None else base)
    env["SGLANG_PLATFORM"] = "torchcpu"
    env["TORCH_COMPILE_DISABLE"] = "1"
    env["HF_HUB_OFFLINE"] = "1"
    env["OMP_NUM_THREADS"] = str(min(len(os.sched_getaffinity(0)), _MAX_THREADS))
    # Threads that spin while they wait make a forward several times slower as soon as anything else
    # wants a core, and the client that feeds the server does.
    env["OMP_WAIT_POLICY"] = "passive"
    return env

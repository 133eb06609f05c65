"""Models without a right setter on real servers; and docs/models.md, which tells of many more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plugin.architectures import (
    CONFIGS,
    DEVIATIONS,
    MARK,
    PAGE,
    TOLERANCE,
    last_words,
    read_results,
    table,
    try_out,
)
from server_patch.capture_points import SETTERS
from server_patch.layer_hooks import METHOD

sglang = [pytest.mark.sglang, pytest.mark.timeout(240)]


@pytest.mark.parametrize(
    "name",
    [
        # Embeddings and residuals are scaled, and it runs on two ranks.
        pytest.param("granite", marks=sglang),
        # SGLang's own capture is wrong here, and hooks replace it.
        pytest.param("gemma3", marks=sglang),
    ],
)
def test_hooks_store_what_hugging_face_has(name: str, tmp_path: Path) -> None:
    args, env = [], {}
    cores = sorted(os.sched_getaffinity(0))
    if name == "granite" and len(cores) > 1:  # the engine binds each rank to a core of its own
        args = ["--tp-size", "2"]
        env = {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[1]}"}
    outcome = try_out(name, tmp_path, args=args, env=env)
    assert outcome.reason is None
    assert outcome.how == METHOD
    assert outcome.error is not None and outcome.error < TOLERANCE


#: A plugin that makes Granite's layers work on something else than they are given.
DOCTORED = """
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

def around(original, layer, positions, hidden_states, forward_batch, residual):
    return original(layer, positions, hidden_states * 2, forward_batch, residual)

def hooks():
    target = "sglang.srt.models.granite.GraniteDecoderLayer.forward"
    HookRegistry.register(target, around, HookType.AROUND)
"""


@pytest.mark.sglang
@pytest.mark.timeout(240)
def test_hooks_that_would_store_something_else_are_refused(tmp_path: Path) -> None:
    metadata = tmp_path / "site" / "doctored-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: doctored\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[sglang.srt.plugins]\ndoctored = doctored:hooks\n")
    (metadata.parent / "doctored.py").write_text(DOCTORED)
    path = [str(metadata.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    outcome = try_out("granite", tmp_path, env={"PYTHONPATH": os.pathsep.join(path)})
    assert outcome.how == "refused"
    assert outcome.reason == (
        "hooks on the layers of GraniteForCausalLM would not store its residual stream: layer 0 "
        "does not hand its state to the first module in it (RMSNorm)"
    )


def test_the_page_says_what_was_found() -> None:
    page = PAGE.read_text()
    assert page.partition(MARK)[2] == f"\n\n{table(read_results())}"


def test_every_architecture_was_tried_and_none_was_found_wrong() -> None:
    results = read_results()
    assert set(results) == set(CONFIGS)
    for name, outcome in results.items():
        assert outcome.architecture == CONFIGS[name]["architectures"][0]
        if outcome.error is None:
            assert outcome.how in ("refused", "not served")
            assert outcome.reason
        else:
            assert outcome.how in (*SETTERS, "layers_to_capture", METHOD)
            assert (outcome.error < TOLERANCE) is (name not in DEVIATIONS), name
            assert outcome.error < 1e-2, name


def test_the_last_words_of_a_server_say_where() -> None:
    log = (
        "Traceback (most recent call last):\n"
        '  File "/x/sglang/srt/models/a.py", line 7, in __init__\n    assert b\nAssertionError\n'
        "the end"
    )
    assert last_words(log) == "AssertionError in __init__ of srt/models/a.py"
    assert last_words("Killed") == "Killed"

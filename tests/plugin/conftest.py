"""Real servers with the plugin, and what Hugging Face says of the same prompts.

Each server takes some 20 seconds to start, so one is shared by all tests that can live with its
arguments, and each covers one more engine mode by the way.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from plugin.reference import Reference
from plugin.serving import Serving, serve


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One model, one server."""

    model: str
    boundaries: str  # as in SGLANG_HS_BOUNDARIES
    resolved: tuple[int, ...]  # what that means for this model
    chunk: int  # tokens
    args: tuple[str, ...] = ()  # of the server, besides the chunk size
    num_writers: int = 1


CASES = {
    "llama": Case(model="llama", boundaries="eagle3", resolved=(2, 4, 5), chunk=32),
    # Tensor parallel, decode steps ride in prefill batches, and a capture point before layer 0.
    "qwen3": Case(
        model="qwen3",
        boundaries="0,3,7",
        resolved=(0, 3, 7),
        chunk=32,
        args=("--tp-size", "2", "--enable-mixed-chunk"),
    ),
    # DeepSeek's setter takes these ids for something else when they are passed as they are. DP
    # attention pads batches, relabels them, and runs both ranks' requests in one forward.
    "deepseek-v3": Case(
        model="deepseek-v3",
        boundaries="1,2,3",
        resolved=(1, 2, 3),
        chunk=32,
        args=("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"),
        num_writers=2,
    ),
    # A trained model, whose states have the outliers of the real thing.
    "smollm2": Case(
        model="smollm2",
        boundaries="eagle3",
        resolved=(2, 15, 27),
        chunk=256,
        args=("--disable-overlap-schedule",),
    ),
}


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a model of the rig, once per session."""
    from rig.models import smollm2, tiny

    root = tmp_path_factory.mktemp("models")

    def make(name: str) -> Path:
        return smollm2(root / name) if name == "smollm2" else tiny(name, root / name)

    return make


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    """Each case in turn. pytest runs all tests of one before the next, so one server is up at a
    time."""
    return CASES[request.param]


@pytest.fixture(scope="session")
def cpu_plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that makes `cpu_dp_attention` an SGLang plugin of processes that have it on their
    path."""
    site = tmp_path_factory.mktemp("site")
    metadata = site / "cpu_dp_attention-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: cpu-dp-attention\nVersion: 0\n"
    )
    (metadata / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\ncpu_dp_attention = cpu_dp_attention:hooks\n"
    )
    source = Path(__file__).with_name("cpu_dp_attention.py")
    (site / source.name).write_text(source.read_text())
    return site


@pytest.fixture(scope="module")
def serving(
    case: Case,
    cpu_plugin: Path,
    model_dir: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Serving]:
    """The running server of the case."""
    env = {}
    if "--tp-size" in case.args:
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            pytest.skip("the engine binds each rank to a core of its own, and there is one core")
        env["SGLANG_CPU_OMP_THREADS_BIND"] = f"{cores[0]}|{cores[1]}"
    if "--enable-dp-attention" in case.args:
        path = [str(cpu_plugin), *filter(None, [os.environ.get("PYTHONPATH")])]
        env["PYTHONPATH"] = os.pathsep.join(path)
    with serve(
        model_dir(case.model),
        tmp_path_factory.mktemp("dumps"),
        boundaries=case.boundaries,
        last="both",
        args=("--chunked-prefill-size", str(case.chunk), *case.args),
        env=env,
    ) as server:
        yield server


@pytest.fixture(scope="module")
def reference(case: Case, model_dir: Callable[[str], Path]) -> Reference:
    """Hugging Face's model of the same weights."""
    return Reference(model_dir(case.model))

"""Real servers with the plugin, and what Hugging Face says of the same prompts.

Each server takes some 20 seconds to start, so one is shared by all tests that can live with its
arguments, and each covers one more engine mode by the way.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest
from rig.env import RIG_PLUGINS

from plugin.forwards import Forward, forwards_of
from plugin.reference import Reference
from plugin.serving import Serving, serve

#: Names of modules of `stand_ins` -> environment of a server that has them as plugins.
EnginePlugins = Callable[..., dict[str, str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One model, one server."""

    model: str  # of `MODELS` or a tiny one
    boundaries: str  # as in SGLANG_HS_BOUNDARIES
    resolved: tuple[int, ...]  # what that means for this model
    chunk: int  # tokens
    args: tuple[str, ...] = ()  # of the server, besides the chunk size
    num_writers: int = 1
    stand_ins: tuple[str, ...] = ()  # modules of `stand_ins` that the server gets as plugins
    quantization: str | None = None


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
        stand_ins=("cpu_dp_attention", "collectives"),
    ),
    # The text model is two classes deep, embeds its own tokens, and is DeepSeek's.
    "kimi-k25": Case(
        model="kimi-k25",
        boundaries="1,2,3",
        resolved=(1, 2, 3),
        chunk=7,
        stand_ins=("cpu_multimodal",),
    ),
    "llama-int8": Case(
        model="llama-int8",
        boundaries="eagle3",
        resolved=(2, 4, 5),
        chunk=-1,
        stand_ins=("cpu_int8",),
        quantization="w8a8_int8",
    ),
    # Replicas with schedulers, writers and directories of their own.
    "llama-dp2": Case(
        model="llama",
        boundaries="eagle3",
        resolved=(2, 4, 5),
        chunk=64,
        args=("--dp-size", "2", "--disable-radix-cache", "--disable-overlap-schedule"),
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
    from rig.derived import kimi_k25, llama_int8
    from rig.models import smollm2, tiny

    root = tmp_path_factory.mktemp("models")
    makers = {"smollm2": smollm2, "kimi-k25": kimi_k25, "llama-int8": llama_int8}

    def make(name: str) -> Path:
        maker = makers.get(name, partial(tiny, name))
        return maker(root / name)

    return make


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    """Each case in turn. pytest runs all tests of one before the next, so one server is up at a
    time."""
    return CASES[request.param]


@pytest.fixture(scope="session")
def engine_plugins(tmp_path_factory: pytest.TempPathFactory) -> EnginePlugins:
    """Makes modules of `stand_ins` SGLang plugins of the servers that get this environment."""

    def make(*names: str) -> dict[str, str]:
        site = tmp_path_factory.mktemp("site")
        for name in names:
            metadata = site / f"{name}-0.dist-info"
            metadata.mkdir()
            (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
            (metadata / "entry_points.txt").write_text(
                f"[sglang.srt.plugins]\n{name} = {name}:hooks\n"
            )
            source = Path(__file__).parent / "stand_ins" / f"{name}.py"
            (site / source.name).write_text(source.read_text())
        path = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"PYTHONPATH": os.pathsep.join(path)}

    return make


def bind_ranks(count: int) -> dict[str, str]:
    """A core of its own for each of `count` ranks; skips the test where there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < count:
        pytest.skip(f"the engine binds each rank to a core of its own: {len(cores)} of {count}")
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, cores[:count]))}


@pytest.fixture(scope="module")
def start(
    case: Case,
    engine_plugins: EnginePlugins,
    model_dir: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[bool], AbstractContextManager[Serving]]:
    """Starts a server of the case, with our plugin or without."""

    def make(plugin: bool) -> AbstractContextManager[Serving]:
        root = tmp_path_factory.mktemp("dumps")
        env = {"RIG_COLLECTIVES": str(root.with_suffix(".collectives"))}
        Path(env["RIG_COLLECTIVES"]).mkdir()
        if {"--tp-size", "--dp-size"} & set(case.args):
            env.update(bind_ranks(2))
        if case.stand_ins:
            env.update(engine_plugins(*case.stand_ins))
        if not plugin:
            env["SGLANG_PLUGINS"] = ",".join([RIG_PLUGINS, *case.stand_ins])
        return serve(
            model_dir(case.model),
            root,
            boundaries=case.boundaries,
            last="both",
            args=("--chunked-prefill-size", str(case.chunk), *case.args),
            env=env,
            plugin=plugin,
        )

    return make


@pytest.fixture(scope="module")
def plain_forwards(
    case: Case, start: Callable[[bool], AbstractContextManager[Serving]]
) -> set[Forward] | None:
    """What a server of the case without our plugin does; None where nothing notes it."""
    if "collectives" not in case.stand_ins:
        return None
    with start(False) as plain:
        return forwards_of(plain)


@pytest.fixture(scope="module")
def serving(
    start: Callable[[bool], AbstractContextManager[Serving]],
    plain_forwards: set[Forward] | None,  # before: two servers would fight for the cores
) -> Iterator[Serving]:
    """The running server of the case."""
    with start(True) as server:
        yield server


@pytest.fixture(scope="module")
def reference(case: Case, model_dir: Callable[[str], Path]) -> Reference:
    """Hugging Face's model of the same weights."""
    return Reference(model_dir(case.model))

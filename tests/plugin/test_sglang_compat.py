"""What the plugin relies on in each release of SGLang, read from the wheels.

A release that moves something fails here with the name of what moved, before any server starts.
The wheels come from the package index. Where it cannot be reached, only the installed release is
looked at; in continuous integration (CI=true, which `.ci/run` sets) that is a failure.
"""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import re
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from packaging.version import Version

from extractor.servers.refusals import BY_MESSAGE
from extractor.servers.sglang_flags import CONFIG_ARGUMENT, graph_arguments
from plugin.wheels import (
    IndexUnreachable,
    Source,
    download,
    in_continuous_integration,
    newer_releases,
)
from server_patch import sglang_api
from server_patch.capture_points import SETTER
from server_patch.sglang_compat import HOOKED, NUMERIC_SETTINGS, RELEASES, TARGETS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("wheels"),  # one worker fetches and reads them
]

#: What every release is given; `--api-key` within the file of `--config`.
FLAGS = ("--disable-radix-cache", "--model-path", CONFIG_ARGUMENT, "--api-key")
#: Model file -> how its setter sets the capture points, and the first release with it. One that
#: is not here works as well: what it set is read back, as for these.
SETTERS = {
    **dict.fromkeys(
        (
            "apertus.py", "bailing_moe.py", "deepseek_v2.py", "exaone_moe.py", "glm4_moe.py",
            "gpt_oss.py", "llama.py", "longcat_flash.py", "minimax_m2.py", "qwen2.py",
            "qwen2_5_vl.py", "qwen3.py", "qwen3_vl.py",
        ),
        ("list", "0.5.11"),
    ),
    **dict.fromkeys(("qwen2_moe.py", "qwen3_next.py"), ("flags", "0.5.11")),
    **dict.fromkeys(
        ("kimi_k25.py", "mindspore.py", "mllama4.py", "qwen3_moe.py"), ("delegates", "0.5.11")
    ),
    **dict.fromkeys(("gemma3_causal.py", "gemma4_causal.py", "gemma4_mm.py"), ("list", "0.5.12")),
    "gemma3_mm.py": ("delegates", "0.5.12"),
    "glm4_moe_lite.py": ("list", "0.5.13"),
    "minimax_m3.py": ("flags", "0.5.16"),
    "minimax_m3_vl.py": ("flags", "0.5.18"),
    "glm5_next.py": ("list", "0.5.20"),
    "qwen3_5.py": ("flags", "0.5.22"),
    "qwen3_5_text.py": ("delegates", "0.5.22"),
}  # fmt: skip
#: (model file, release): its setter sets the list, but its forward asks for the flags. A request is
#: answered with an error record there ("the engine captured nothing").
BROKEN_SETTERS = {("minimax_m3.py", "0.5.16"), ("minimax_m3.py", "0.5.17")}


def refuse_or_skip(error: IndexUnreachable) -> None:
    """A check that silently does not run in CI is none."""
    if in_continuous_integration():
        pytest.fail(f"{error}. CI must reach the package index")
    pytest.skip(str(error))


@pytest.fixture(scope="session")
def wheel_folder(pytestconfig: pytest.Config) -> Path:
    """Where wheels stay between runs (20 MB each)."""
    assert pytestconfig.cache is not None
    return pytestconfig.cache.mkdir("sglang-wheels")


@pytest.fixture(scope="session")
def wheels(wheel_folder: Path) -> dict[str, Path | IndexUnreachable]:
    """release -> its wheel, or why there is none."""

    def get(release: str) -> Path | IndexUnreachable:
        try:
            return download(release, wheel_folder)
        except IndexUnreachable as error:
            return error

    with ThreadPoolExecutor(max_workers=4) as pool:
        return dict(zip(RELEASES, pool.map(get, RELEASES), strict=True))


@pytest.fixture(scope="module", params=RELEASES)
def source(request: pytest.FixtureRequest, wheels: dict[str, Path | IndexUnreachable]) -> Source:
    """The source of each release in turn."""
    wheel = wheels[request.param]
    if isinstance(wheel, IndexUnreachable):
        refuse_or_skip(wheel)
    assert isinstance(wheel, Path)
    return Source(request.param, wheel)


def test_each_release_words_its_refusals_as_the_client_expects(source: Source) -> None:
    words = source.text("sglang/srt/managers/tokenizer_manager.py").lower()
    assert all(message in words for message in BY_MESSAGE)


def test_each_release_reads_arguments_from_a_file(source: Source) -> None:
    """In `prepare_server_args`, in its own process: the command line does not change."""
    (module,) = [path for path in source.files if path.endswith("/server_args_config_parser.py")]
    assert "yaml.safe_load" in source.text(module)
    launch = source.text("sglang/srt/server_args.py")
    assert "merge_config_with_args(argv)" in launch
    assert f'"{CONFIG_ARGUMENT}" in argv' in launch


def problems_of(source: Source) -> list[str]:
    """Everything of the table that this release does not have, by name."""
    found = [problem for target in TARGETS if (problem := source.missing(target))]
    found += [
        f"SGLang {source.release} has no argument {flag}"
        for flag in (*flags_passed(source.release), *FLAGS)
        if not source.has_flag(flag)
    ]
    found += [
        f"SGLang {source.release}: {SETTER} of models/{file} sets nothing that can be read back"
        for file, kinds in source.setters(SETTER).items()
        if "unknown" in kinds
    ]
    return found


def flags_passed(release: str) -> list[str]:
    return [argument.partition("=")[0] for argument in graph_arguments(release)]


def test_a_release_has_everything_the_plugin_touches(source: Source) -> None:
    assert problems_of(source) == []


def test_a_release_has_these_setters(source: Source) -> None:
    found = {file: kinds[0] for file, kinds in source.setters(SETTER).items()}
    for file, _ in [known for known in BROKEN_SETTERS if known[1] == source.release]:
        assert found[file] == "list"
        found[file] = "flags"
    assert found == {
        file: kind
        for file, (kind, since) in SETTERS.items()
        if Version(since) <= Version(source.release)
    }


def test_newer_releases_have_it_too(wheel_folder: Path) -> None:
    try:
        for release in newer_releases(RELEASES[-1]):
            source = Source(release, download(release, wheel_folder))
            assert problems_of(source) == []
    except IndexUnreachable as error:
        refuse_or_skip(error)


def installed() -> Source:
    distribution = importlib.metadata.distribution("sglang")
    return Source(distribution.version, Path(str(distribution.locate_file(""))))


def test_the_installed_release_has_it() -> None:
    """The one check that needs no index."""
    assert problems_of(installed()) == []


# ---- the checks can fail -----------------------------------------------------------------------

#: What a wheel must hold for the checks; the whole of one takes seconds to pack.
PARTS = (
    "sglang/version.py", "sglang/_version.py", "sglang/srt/plugins/", "sglang/srt/server_args.py",
    "sglang/srt/arg_groups/", "sglang/srt/runtime_context.py", "sglang/srt/configs/model_config.py",
    "sglang/srt/model_executor/forward_batch_info.py", "sglang/srt/model_executor/model_runner.py",
    "sglang/srt/model_executor/cuda_graph_config.py", "sglang/srt/managers/schedule_batch.py",
    "sglang/srt/managers/scheduler.py", "sglang/srt/layers/layer_boundary/__init__.py",
    "sglang/srt/models/llama.py", "sglang/srt/distributed/parallel_state.py",
    "sglang/srt/managers/scheduler_components/weight_updater.py",
    "sglang/srt/managers/io_struct.py", "sglang/srt/lora/lora_registry.py",
    "sglang/srt/model_executor/model_runner_components/weight_updater.py",
)  # fmt: skip


def doctored(folder: Path, file: str, old: str, new: str) -> Source:
    """A wheel as the installed release, but with `old` of `file` replaced."""
    original = installed()
    path = folder / f"sglang-{original.release}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name in original.files:
            if name.startswith(PARTS):
                text = original.text(name)
                if name == file:
                    assert old in text
                    text = text.replace(old, new)
                wheel.writestr(name, text)
    return Source(original.release, path)


@pytest.mark.parametrize(
    ("file", "old", "new", "named"),
    [
        (
            "model_executor/model_runner.py", "def load_model(", "def load_weights_of(",
            "no sglang.srt.model_executor.model_runner:ModelRunner.load_model",
        ),
        (
            "model_executor/forward_batch_info.py", "rids: Optional", "request_ids: Optional",
            "no sglang.srt.model_executor.forward_batch_info:ForwardBatch.rids",
        ),
        (
            "model_executor/forward_batch_info.py", "batch: ScheduleBatch,", "plan: ScheduleBatch,",
            "ForwardBatch.init_new takes ('plan', 'model_runner'",
        ),
        (
            "plugins/__init__.py", '"sglang.srt.plugins"', '"sglang.plugins"',
            "GENERAL_PLUGINS_GROUP is GENERAL_PLUGINS_GROUP = 'sglang.plugins'",
        ),
        (
            "managers/scheduler.py", "    load_plugins()\n", "    pass\n",
            "run_scheduler_process does not call load_plugins",
        ),
        (
            "arg_groups/fields/parallel.py", "    pp_size:", "    pipeline_size:",
            "no sglang.srt.server_args:ServerArgs.pp_size",
        ),
        (
            "arg_groups/fields/exec_.py", "cuda_graph_backend_prefill:", "prefill_graphs:",
            "no argument --cuda-graph-backend-prefill",
        ),
        (
            "model_executor/model_runner_components/weight_updater.py",
            "def update_weights_from_disk(", "def take_weights_from_disk(",
            "WeightUpdater.update_weights_from_disk (hooked: new weights)",
        ),
        (
            "models/llama.py", "self.model.layers_to_capture = ", "self.model.points = ",
            "of models/llama.py sets nothing that can be read back",
        ),
    ],
)  # fmt: skip
def test_what_moved_is_named(file: str, old: str, new: str, named: str, tmp_path: Path) -> None:
    (problem,) = problems_of(doctored(tmp_path, f"sglang/srt/{file}", old, new))
    assert named in problem


def test_an_index_that_cannot_be_reached_fails_in_ci_and_only_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    for name, value in {
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "", "PIP_RETRIES": "0", "PIP_NO_CACHE_DIR": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    with pytest.raises(IndexUnreachable, match=r"sglang 0\.5\.11 cannot be downloaded"):
        download("0.5.11", tmp_path)
    with pytest.raises(IndexUnreachable) as unreachable:
        newer_releases("0.5.11")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="CI must reach the package index"):
        refuse_or_skip(unreachable.value)
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception):
        refuse_or_skip(unreachable.value)


# ---- the table and sglang_api.py are one -------------------------------------------------------

#: Asked for by sglang_api.py, and not SGLang's: of a Hugging Face config, of torch, or our own.
NOT_THE_ENGINES = {
    "num_hidden_layers", "hidden_size", "prompt_lens", "sglang.srt.runtime_context", "transformers",
    "__version__",
}  # fmt: skip


def names_asked_for() -> set[str]:
    """What sglang_api.py looks up by name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(inspect.getsource(sglang_api))):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func).rpartition(".")[2]
        first = {"getattr": 1, "hasattr": 1, "_get": 1, "_int_list": 1}.get(called)
        if called in ("setting", "get", "need"):
            first = 0
        if first is not None:
            last = len(node.args) if called == "_get" else first + 1
            for name in node.args[first:last]:
                if isinstance(name, ast.Constant):
                    assert isinstance(name.value, str), ast.unparse(node)
                    found.add(name.value)
    return found


def test_everything_that_is_looked_up_is_in_the_table() -> None:
    listed = {place.rpartition(".")[2].rpartition(":")[2] for t in TARGETS for place in t.places}
    asked = names_asked_for()
    assert len(asked) > 30
    assert asked - NOT_THE_ENGINES <= listed


def test_everything_in_the_table_is_looked_up() -> None:
    words = set(re.findall(r"\w+", inspect.getsource(sglang_api)))
    looked_up = [target for target in TARGETS if target not in (*HOOKED, *NUMERIC_SETTINGS)]
    listed = [[p.rpartition(".")[2].rpartition(":")[2] for p in t.places] for t in looked_up]
    loading = {"GENERAL_PLUGINS_GROUP", "run_scheduler_process", "load_model", "init_new"}
    # DECODE and IDLE are what is left when a prefill is EXTEND or MIXED.
    loading |= {"DECODE", "IDLE", "register"}
    assert [names for names in listed if not set(names) & (words | loading)] == []

"""The entry point, the directories, and the refusals, without an engine."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import change_ready

from server_patch import arming, capture_audit, capture_points, plugin, sglang_api, weights
from server_patch.dump_dir import RankDirError, make_boot_id, make_rank_dir
from server_patch.dump_format import FAILED_NAME, READY_NAME, Ready, decode_ready
from server_patch.ready import own_start_ticks
from server_patch.settings import SettingsError
from server_patch.sglang_api import EngineError, RequestIds, RunnerFacts
from server_patch.trust import UntrustedDirectory


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SGLANG_HS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(sglang_api, "version", lambda: "9.9.9")


class FakeInner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(8))
        self.norm = torch.nn.Identity()
        self.layers_to_capture: list[int] = []

    def forward(self, input_ids: Any, positions: Any, forward_batch: Any) -> Any:
        return input_ids


class FakeForCausalLM(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = FakeInner()
        self.capture_aux_hidden_states = False

    def set_eagle3_layers_to_capture(self, ids: list[int]) -> None:
        self.capture_aux_hidden_states = True
        self.model.layers_to_capture = [value + 1 for value in ids]


def make_runner(tmp_path: Path, **args: Any) -> Any:
    (tmp_path / "config.json").write_text('{"b": 1, "a": [2]}')
    server_args: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": 30000,
        "model_path": str(tmp_path),
        "tp_size": 1,
        "dp_size": 1,
        "pp_size": 1,
        "enable_dp_attention": False,
        "speculative_algorithm": None,
        "chunked_prefill_size": 64,
        "max_prefill_tokens": 16384,
        "disable_radix_cache": True,
        "kv_cache_dtype": "auto",
        "quantization": None,
    }
    text_config = SimpleNamespace(num_hidden_layers=8, hidden_size=16)
    return SimpleNamespace(
        is_draft_worker=False,
        model=FakeForCausalLM(),
        server_args=SimpleNamespace(**{**server_args, **args}),
        model_config=SimpleNamespace(
            hf_text_config=text_config, dtype=torch.bfloat16, vocab_size=512
        ),
    )


def read_facts(runner: Any) -> RunnerFacts:
    return sglang_api.read_facts(runner, architecture="FakeForCausalLM")


@pytest.fixture
def armed_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A dump root, and an engine that is attention-TP rank 0."""
    root = tmp_path / "root"
    monkeypatch.setenv("SGLANG_HS_DUMP_DIR", str(root))
    monkeypatch.setenv("SGLANG_HS_BOOT_ID", "boot")
    monkeypatch.setattr(sglang_api, "_attention_tp_rank", lambda: 0)
    return root


def test_without_a_dump_dir_nothing_is_imported_or_registered() -> None:
    code = (
        "import sys; from server_patch.plugin import register; register(); import os; "
        "heavy = [m for m in ('torch', 'sglang', 'numpy') if m in sys.modules]; "
        "assert not heavy, heavy; assert 'SGLANG_HS_BOOT_ID' not in os.environ"
    )
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_HS_")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environ)


def test_registering_makes_one_boot_id_and_keeps_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    registered: list[str] = []
    monkeypatch.setattr(
        sglang_api, "register_after", lambda target, hook: registered.append(target)
    )
    monkeypatch.setattr(sglang_api, "register_weight_hooks", lambda **_: None)
    monkeypatch.setenv("SGLANG_HS_DUMP_DIR", str(tmp_path))
    # Remembered for removal: `register` sets it behind the fixture's back.
    monkeypatch.setenv("SGLANG_HS_BOOT_ID", "x")
    monkeypatch.delenv("SGLANG_HS_BOOT_ID")
    plugin.register()
    first = os.environ["SGLANG_HS_BOOT_ID"]
    plugin.register()
    assert os.environ["SGLANG_HS_BOOT_ID"] == first
    assert set(registered) == {sglang_api.LOAD_MODEL, sglang_api.INIT_FORWARD_BATCH}


def test_bad_settings_leave_their_reason_under_the_root(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SGLANG_HS_DUMP_DIR", str(tmp_path))
    monkeypatch.setenv("SGLANG_HS_BOOT_ID", "boot")
    monkeypatch.setenv("SGLANG_HS_LAST", "none")
    for _ in range(2):  # each process of the server
        with pytest.raises(SettingsError):
            plugin.register()
    failed = json.loads((tmp_path / "boot" / "0" / FAILED_NAME).read_bytes())
    assert failed["reason"] == "SGLANG_HS_LAST must be post, pre or both, is 'none'"


def test_a_loaded_model_is_armed_and_ready(armed_environment: Path, tmp_path: Path) -> None:
    runner = make_runner(tmp_path)
    plain = runner.model.model.forward
    arming.after_load_model(None, runner)
    ready = decode_ready((armed_environment / "boot" / "0" / READY_NAME).read_bytes())
    assert ready.capture.boundaries == (2, 4, 5)
    assert (ready.process.pid, ready.process.start_ticks) == (os.getpid(), own_start_ticks())
    assert (ready.model.architecture, ready.model.dtype, ready.capture.num_writers) == (
        "FakeForCausalLM",
        "BF16",
        1,
    )
    assert (ready.engine.radix_cache, ready.engine.chunked_prefill_size) == (False, 64)
    assert ready.model.config_digest == hashlib.sha256(b'{"a":[2],"b":1}').hexdigest()
    assert runner.model.capture_aux_hidden_states is False
    assert runner.model.model.forward is not plain
    assert (armed_environment / "boot").stat().st_mode & 0o777 == 0o700


def read_ready(root: Path) -> Ready:
    return decode_ready((root / "boot" / "0" / READY_NAME).read_bytes())


def test_ready_names_the_weights_by_their_content(
    armed_environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_runner(tmp_path, weight_version="v7")
    second = make_runner(tmp_path)
    second.model.load_state_dict(first.model.state_dict())
    with torch.no_grad():
        next(second.model.parameters()).add_(1e-3)
    found = []
    for boot, runner in (("boot", first), ("again", first), ("changed", second)):
        monkeypatch.setenv("SGLANG_HS_BOOT_ID", boot)
        arming.after_load_model(None, runner)
        path = armed_environment / boot / "0" / READY_NAME
        found.append(decode_ready(path.read_bytes()))
        vars(runner.model.model).pop("forward")
    assert found[0].weights.id == found[1].weights.id != found[2].weights.id
    assert found[0].weights.layout == found[1].weights.layout == found[2].weights.layout
    assert (found[0].weights.version, found[2].weights.version) == ("v7", None)
    assert found[0].weights.seconds is not None


def test_weights_that_cannot_be_read_leave_ready_without_their_id(
    armed_environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_model: Any) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(weights, "fingerprint", broken)
    arming.after_load_model(None, make_runner(tmp_path))
    assert read_ready(armed_environment).weights.id is None


def test_ready_is_rewritten_after_an_update_and_a_new_label(
    armed_environment: Path, tmp_path: Path
) -> None:
    arming.after_load_model(None, make_runner(tmp_path, weight_version="default"))
    loaded = read_ready(armed_environment)
    arming.before_weight_update()
    updated = read_ready(armed_environment)
    assert updated.weights.id is not None and loaded.weights.id is not None
    assert updated.weights.id.startswith(f"{loaded.weights.id}+")
    assert updated == change_ready(loaded, weights=updated.weights.id)
    arming.after_weight_label("v2")
    assert read_ready(armed_environment) == change_ready(updated, weight_version="v2")


def test_an_update_does_not_restore_a_removed_ready(
    armed_environment: Path, tmp_path: Path
) -> None:
    arming.after_load_model(None, make_runner(tmp_path))
    (armed_environment / "boot" / "0" / READY_NAME).unlink()
    arming.before_weight_update()
    assert not (armed_environment / "boot" / "0" / READY_NAME).exists()


def test_ready_is_rewritten_when_late_weights_are_loaded(
    armed_environment: Path, tmp_path: Path
) -> None:
    runner = make_runner(tmp_path)
    runner.startup_weight_load = object()
    arming.after_load_model(None, runner)
    assert read_ready(armed_environment).weights.id is None
    runner.startup_weight_load = None
    arming.after_late_load(runner)
    assert read_ready(armed_environment).weights.id is not None


def test_ready_has_the_numeric_settings_as_the_engine_resolved_them(
    armed_environment: Path, tmp_path: Path
) -> None:
    adapter = SimpleNamespace(lora_id="random", lora_name="a", lora_path="/adapters/a")
    runner = make_runner(
        tmp_path,
        kv_cache_dtype="fp8_e5m2",
        attention_backend="triton",
        enable_deterministic_inference=True,
        torchao_config="",
        json_model_override_args='{"rope_theta": 1}',
        moe_a2a_backend="none",
        tp_size=1,
        page_size=16,
        lora_paths=[adapter],
        lora_target_modules={"v_proj", "q_proj"},
        forward_hooks=[{"hook_factory": "x" * 1000}],
        api_key="secret",
    )
    runner.model_config.quantization = "fp8"
    runner.model_config.context_len = 4096
    runner.model_config.hf_text_config.rope_theta = 1
    runner.model_config.hf_config = SimpleNamespace(
        to_dict=lambda: {"a": torch.bfloat16, "_name_or_path": "/any"}
    )
    arming.after_load_model(None, runner)
    settings = dict(read_ready(armed_environment).engine.settings)
    assert len(settings.pop("forward_hooks")) <= 300
    assert settings.pop("torch") == torch.__version__
    settings.pop("transformers", None)
    assert settings == {
        "kv_cache_dtype": "fp8_e5m2",
        "attention_backend": "triton",
        "enable_deterministic_inference": "true",
        "json_model_override_args": '{"rope_theta": 1}',
        "page_size": "16",
        "lora_paths": '["a=/adapters/a"]',
        "lora_target_modules": '["q_proj","v_proj"]',
        "quantization": "fp8",
        "context_length": "4096",
        "rope": '{"rope_theta":1}',
        "model_config": hashlib.sha256(b'{"a":"torch.bfloat16"}').hexdigest()[:32],
        "device": "cpu",
    }


class Registry:
    """A fake of the engine's hook registry; `call` acts like its wrapper."""

    def __init__(self) -> None:
        self.hooks: list[tuple[str, str, Any]] = []

    def call(self, target: str, *args: Any, result: Any = None, **kwargs: Any) -> None:
        for name, kind, hook in self.hooks:
            if name == target:
                assert hook(*([result] if kind == "after" else []), *args, **kwargs) is None


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    made = Registry()
    for kind in ("before", "after"):
        monkeypatch.setattr(
            sglang_api,
            f"register_{kind}",
            lambda target, hook, kind=kind: made.hooks.append((target, kind, hook)),
        )
    return made


def stand_in_engine(monkeypatch: pytest.MonkeyPatch, *places: str) -> None:
    """Fake a release of the engine that has only these places."""

    def resolve(place: str) -> None:
        if place not in places:
            raise AttributeError(place)

    monkeypatch.setattr("server_patch.sglang_api.pkgutil.resolve_name", resolve)


RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner"
MIXIN = "sglang.srt.managers.scheduler_update_weights_mixin:SchedulerUpdateWeightsMixin"
SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"


def test_each_way_of_changing_the_weights_is_hooked(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Any] = []
    places = [
        f"{RUNNER}.update_weights_from_disk",
        f"{RUNNER}.check_weights",
        f"{RUNNER}.finalize_startup_weight_load",
        f"{MIXIN}.release_memory_occupation",
        f"{MIXIN}.update_weights_from_disk",
    ]
    stand_in_engine(monkeypatch, *places)
    sglang_api.register_weight_hooks(
        before_update=lambda: heard.append("update"),
        after_label=heard.append,
        after_late_load=heard.append,
    )
    update, check, late, release, request = (place.replace(":", ".") for place in places)
    assert {target for target, _, _ in registry.hooks} == {update, check, late, release, request}
    registry.call(update, "runner", "/model", "auto")
    assert heard == ["update"]
    registry.call(check, "runner", action="snapshot")
    registry.call(release, "scheduler", SimpleNamespace(tags=["kv_cache"]))
    assert heard == ["update"]
    registry.call(check, "runner", action="reset_tensors", allow_quant_error=False)
    registry.call(release, "scheduler", SimpleNamespace(tags=["weights"]))
    registry.call(release, "scheduler", SimpleNamespace(tags=None))
    assert heard == ["update"] * 4
    asked = SimpleNamespace(weight_version="v2")
    registry.call(request, "scheduler", asked, result=SimpleNamespace(success=False))
    assert heard == ["update"] * 4
    registry.call(request, "scheduler", asked, result=SimpleNamespace(success=True))
    registry.call(late, "the runner")
    assert heard[4:] == ["v2", "the runner"]


def test_the_label_hook_of_newer_schedulers_is_used(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    label = f"{SCHEDULER}.record_weight_version_change"
    stand_in_engine(monkeypatch, label, f"{MIXIN}.update_weights_from_disk")
    sglang_api.register_weight_hooks(
        before_update=lambda: None, after_label=heard.append, after_late_load=lambda _: None
    )
    assert [target for target, _, _ in registry.hooks] == [label.replace(":", ".")]
    registry.call(label.replace(":", "."), "scheduler", new_version=None)
    registry.call(label.replace(":", "."), "scheduler", new_version="v3")
    assert heard == ["v3"]


def test_an_update_continues_even_if_our_hook_fails(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise OSError("disk full")

    stand_in_engine(monkeypatch, f"{RUNNER}.update_weights_from_ipc")
    sglang_api.register_weight_hooks(
        before_update=fail, after_label=lambda _: None, after_late_load=lambda _: None
    )
    with caplog.at_level(logging.ERROR):
        registry.call(f"{RUNNER}.update_weights_from_ipc".replace(":", "."), "runner", "request")
    assert "disk full" in caplog.text


def test_the_quantisation_of_the_models_own_config_is_told(
    armed_environment: Path, tmp_path: Path
) -> None:
    """Without an argument the engine does what config.json asks for."""
    runner = make_runner(tmp_path)
    runner.model_config.quantization = "fp8"
    assert read_facts(runner).model.quantization == "fp8"
    assert read_facts(make_runner(tmp_path, quantization="awq")).model.quantization == "awq"


def test_a_second_engine_of_the_same_tree_gets_a_directory_of_its_own(
    armed_environment: Path, tmp_path: Path
) -> None:
    for _ in range(2):
        arming.after_load_model(None, make_runner(tmp_path))
    boots = {path.parent.parent.name for path in armed_environment.glob(f"*/0/{READY_NAME}")}
    assert len(boots) == 2
    for boot in boots:
        ready = decode_ready((armed_environment / boot / "0" / READY_NAME).read_bytes())
        assert ready.boot_id == boot


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"pp_size": 2}, "--pp-size 1"),
        ({"speculative_algorithm": "EAGLE3"}, "--speculative-algorithm"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
        ({"enable_torch_compile": True}, "--enable-torch-compile"),
        ({"attn_cp_size": 2}, "--attn-cp-size"),
        ({"enable_prefill_context_parallel": True}, "context parallel"),
        ({"enable_return_aux_hidden_states": True}, "--enable-return-aux-hidden-states"),
    ],
)
def test_refusals_say_which_flag_to_change(
    args: dict[str, Any], reason: str, armed_environment: Path, tmp_path: Path
) -> None:
    runner = make_runner(tmp_path, **args)
    arming.after_load_model(None, runner)
    assert os.listdir(armed_environment / "boot" / "0") == [FAILED_NAME]
    failed = json.loads((armed_environment / "boot" / "0" / FAILED_NAME).read_bytes())
    assert reason in failed["reason"]
    assert runner.model.capture_aux_hidden_states is False
    assert "forward" not in vars(runner.model.model)


@pytest.mark.parametrize(
    ("args", "flag"),
    [
        ({"disable_piecewise_cuda_graph": False}, "--disable-piecewise-cuda-graph"),
        ({"disable_piecewise_cuda_graph": True}, None),
        (
            {"cuda_graph_config": SimpleNamespace(prefill=SimpleNamespace(backend="breakable"))},
            "--cuda-graph-backend-prefill disabled",
        ),
        ({"cuda_graph_config": SimpleNamespace(prefill=SimpleNamespace(backend="disabled"))}, None),
        ({}, None),
    ],
)
def test_prefill_graphs_are_refused_on_cuda_only(args: dict[str, Any], flag: str | None) -> None:
    server_args = sglang_api.EngineSettings(SimpleNamespace(**args))
    reason = sglang_api._prefill_graphs(server_args, torch.device("cuda", 0))
    assert (flag in reason) if flag and reason else (reason is None)
    assert sglang_api._prefill_graphs(server_args, torch.device("cpu")) is None


def test_settings_are_the_engines_and_not_what_was_typed(
    monkeypatch: pytest.MonkeyPatch, armed_environment: Path, tmp_path: Path
) -> None:
    """Newer engines leave the record of arguments as the user gave them, and publish apart what
    they made of it."""

    def leaf(name: str) -> Any:
        if name not in resolved:
            raise ValueError(f"{name!r} is not a config leaf (no namespace)")
        return resolved[name]

    resolved: dict[str, object] = {
        "chunked_prefill_size": 2048, "dp_size": 1, "attn_dp_size": 2, "pp_size": 1
    }  # fmt: skip
    context = SimpleNamespace(get_context=lambda: SimpleNamespace(config_leaf=leaf))
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    monkeypatch.setattr(sglang_api, "_parallel_context", lambda: SimpleNamespace(attn_dp_rank=1))
    runner = make_runner(
        tmp_path, chunked_prefill_size=None, dp_size=2, attn_dp_size=1, enable_dp_attention=True
    )
    facts = read_facts(runner)
    assert (facts.engine.chunked_prefill_size, facts.max_forward_rows) == (2048, 2048)
    assert (facts.engine.dp_size, facts.placement.shares_forward) == (2, True)
    assert (facts.port, facts.engine.radix_cache) == (30000, False)  # none of the context's
    # What this release does not know is not asked for, and so is not taken to be set.
    resolved["enable_pdmux"] = True
    assert sglang_api.refusals(runner) == []
    # Defaults that the engine fills in are seen.
    config = SimpleNamespace(prefill=SimpleNamespace(backend="breakable"))
    record = sglang_api.EngineSettings(SimpleNamespace(cuda_graph_config=None))
    resolved["cuda_graph_config"] = config
    assert "breakable" in str(sglang_api._prefill_graphs(record, torch.device("cuda", 0)))


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"skip_server_warmup": True}, "drop --skip-server-warmup"),
        ({"dp_size": 2, "enable_dp_attention": True}, "drop --enable-dp-attention"),
        ({}, "FakeLayer.forward takes no hidden_states"),
    ],
)
def test_a_model_without_setter_is_refused_where_hooks_cannot_be_proven_right(
    args: dict[str, Any],
    reason: str,
    armed_environment: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class FakeLayer(torch.nn.Linear):
        def forward(self, x: Any) -> Any:
            return x

    monkeypatch.delattr(FakeForCausalLM, "set_eagle3_layers_to_capture")
    monkeypatch.setattr(
        sglang_api, "_parallel_context", lambda: SimpleNamespace(attn_dp_rank=0, dp_rank=0)
    )
    runner = make_runner(tmp_path, **args)
    runner.model.model.layers_to_capture = None
    runner.model.model.layers = torch.nn.ModuleList(FakeLayer(1, 1) for _ in range(8))
    arming.after_load_model(None, runner)
    failed = json.loads((armed_environment / "boot" / "0" / FAILED_NAME).read_bytes())
    assert reason in failed["reason"]
    assert "forward" not in vars(runner.model.model)


class LayerThatOwes(torch.nn.Linear):
    """Its all-reduce may be left to the next layer's norm."""

    layer_communicator = SimpleNamespace(should_fuse_mlp_allreduce_with_next_layer=lambda: True)

    def forward(self, positions: Any, hidden_states: Any) -> Any:
        return hidden_states


class LayerThatCaptures(LayerThatOwes):
    def forward(
        self, positions: Any, hidden_states: Any, captured_last_layer_outputs: Any = None
    ) -> Any:
        return hidden_states


@pytest.mark.parametrize(
    ("layer", "args", "is_refused"),
    [
        (LayerThatOwes, {"enable_flashinfer_allreduce_fusion": True}, True),
        (LayerThatOwes, {"flashinfer_allreduce_fusion_backend": "auto"}, True),
        (LayerThatOwes, {"enable_aiter_allreduce_fusion": True}, True),
        (LayerThatOwes, {"flashinfer_allreduce_fusion_backend": "auto", "tp_size": 1}, False),
        (LayerThatOwes, {"enable_flashinfer_allreduce_fusion": False}, False),
        (LayerThatCaptures, {"flashinfer_allreduce_fusion_backend": "auto"}, False),
        (torch.nn.Linear, {"flashinfer_allreduce_fusion_backend": "auto"}, False),
    ],
)
def test_a_capture_before_a_fused_all_reduce_is_refused(
    layer: type[torch.nn.Linear],
    args: dict[str, Any],
    is_refused: bool,
    armed_environment: Path,
    tmp_path: Path,
) -> None:
    runner = make_runner(tmp_path, **{"tp_size": 2, **args})
    runner.model.model.layers = torch.nn.ModuleList(layer(1, 1) for _ in range(8))
    arming.after_load_model(None, runner)
    home = armed_environment / "boot" / "0"
    assert (home / READY_NAME).exists() is not is_refused
    if is_refused:
        reason = json.loads((home / FAILED_NAME).read_bytes())["reason"]
        assert "--enforce-disable-flashinfer-allreduce-fusion" in reason


class FakeAudit:
    """Decides when it is told to."""

    last: FakeAudit

    def __init__(self, parts: Any, *, must_prove: bool, right: Any, wrong: Any) -> None:
        self.must_prove, self.right, self.wrong = must_prove, right, wrong
        FakeAudit.last = self


def test_points_without_a_setter_are_announced_when_they_are_proven(
    armed_environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(FakeForCausalLM, "set_eagle3_layers_to_capture")
    monkeypatch.setattr(capture_audit, "PointsAudit", FakeAudit)
    arming.after_load_model(None, make_runner(tmp_path))
    home = armed_environment / "boot" / "0"
    assert FakeAudit.last.must_prove
    assert not (home / READY_NAME).exists()
    FakeAudit.last.right()
    ready = decode_ready((home / READY_NAME).read_bytes())
    assert (ready.capture.method, ready.capture.boundaries) == ("layers_to_capture", (2, 4, 5))


def test_points_that_are_found_wrong_are_taken_back(
    armed_environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_audit, "PointsAudit", FakeAudit)
    arming.after_load_model(None, make_runner(tmp_path))
    home = armed_environment / "boot" / "0"
    assert decode_ready((home / READY_NAME).read_bytes()).capture.method == capture_points.SETTER
    assert not FakeAudit.last.must_prove
    FakeAudit.last.right()  # changes nothing
    FakeAudit.last.wrong("one layer off", None)
    assert json.loads((home / FAILED_NAME).read_bytes())["reason"] == "one layer off"
    assert not (home / READY_NAME).exists()


def test_other_ranks_arm_and_write_nothing(
    armed_environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_api, "_attention_tp_rank", lambda: 1)
    runner = make_runner(tmp_path)
    arming.after_load_model(None, runner)
    assert not armed_environment.exists()
    assert "forward" in vars(runner.model.model)


def test_a_writer_that_cannot_start_keeps_the_capture_of_all_ranks_alike(
    armed_environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's capture may hold collectives: rank 0 must go on taking part in them."""
    monkeypatch.setenv("SGLANG_HS_RING_BYTES", "65536")
    runner = make_runner(tmp_path)
    runner.model_config.hf_text_config.hidden_size = 1 << 20
    arming.after_load_model(None, runner)
    assert os.listdir(armed_environment / "boot" / "0") == [FAILED_NAME]
    assert "forward" in vars(runner.model.model)


def test_draft_models_are_left_alone(armed_environment: Path, tmp_path: Path) -> None:
    runner = make_runner(tmp_path)
    runner.is_draft_worker = True
    arming.after_load_model(None, runner)
    assert not armed_environment.exists()


def test_nothing_that_fails_reaches_the_engine(
    armed_environment: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    armed_environment.write_text("a file where the root should be")
    with caplog.at_level(logging.ERROR):
        arming.after_load_model(None, SimpleNamespace())
        arming.after_load_model(None, make_runner(tmp_path))
    assert "SimpleNamespace has no is_draft_worker in SGLang 9.9.9" in caplog.text
    assert "nothing will be written" in caplog.text


def test_nothing_is_captured_under_a_root_that_others_can_change(
    armed_environment: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    armed_environment.mkdir()
    os.chmod(armed_environment, 0o777)
    with caplog.at_level(logging.ERROR):
        arming.after_load_model(None, make_runner(tmp_path))
    assert f"can be changed by others (mode 777): '{armed_environment}'" in caplog.text
    assert os.listdir(armed_environment) == []


class TestHome:
    def test_a_root_that_its_group_can_change_is_used_where_the_group_may_write(
        self, tmp_path: Path
    ) -> None:
        root = tmp_path / "r"
        root.mkdir()
        os.chmod(root, 0o770)
        with pytest.raises(UntrustedDirectory, match="by its group"):
            self.make(root)
        make_rank_dir(root, boot_id="b", rank=0, num_ranks=1, file_mode=0o660, directory_mode=0o770)
        assert (root / "b" / "0").stat().st_mode & 0o777 == 0o770

    def test_a_boot_directory_swapped_for_a_link_is_not_changed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        victim = tmp_path / "victim"
        victim.mkdir(mode=0o711)
        real = os.mkdir

        def mkdir(name: str, mode: int, *, dir_fd: int) -> None:
            real(name, mode, dir_fd=dir_fd)
            if name == "b":
                (tmp_path / "r" / "b").rmdir()
                (tmp_path / "r" / "b").symlink_to(victim)

        monkeypatch.setattr(os, "mkdir", mkdir)
        with pytest.raises(OSError):
            self.make(tmp_path / "r")
        assert victim.stat().st_mode & 0o777 == 0o711
        assert os.listdir(victim) == []

    def make(self, root: Path, **change: Any) -> Any:
        fields = {"boot_id": "b", "rank": 0, "num_ranks": 2, "file_mode": 0o640}
        return make_rank_dir(root, directory_mode=0o750, **{**fields, **change})

    def test_ranks_share_a_boot_and_modes_are_exact(self, tmp_path: Path) -> None:
        before = os.umask(0o077)
        try:
            homes = [self.make(tmp_path / "r", rank=rank) for rank in range(2)]
        finally:
            os.umask(before)
        assert [home.directory.path for home in homes] == [tmp_path / "r/b/0", tmp_path / "r/b/1"]
        # The root too: a client of another user has to get through it.
        for made in ("r", "r/b", "r/b/1"):
            assert (tmp_path / made).stat().st_mode & 0o777 == 0o750, made

    def test_a_root_that_is_there_keeps_its_mode_and_hands_on_its_group(
        self, tmp_path: Path
    ) -> None:
        root = tmp_path / "r"
        root.mkdir()
        os.chmod(root, 0o2711)
        home = self.make(root)
        assert root.stat().st_mode & 0o7777 == 0o2711
        for made in (home.directory.path.parent, home.directory.path):
            assert made.stat().st_mode & 0o7777 == 0o2750, made

    def test_a_rank_the_engine_does_not_tell_is_the_first_free_one(self, tmp_path: Path) -> None:
        assert [self.make(tmp_path, rank=None).rank for _ in range(3)] == [0, 1, 0]
        assert len(list(tmp_path.iterdir())) == 2

    def test_it_gives_up(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("server_patch.dump_dir._random_hex", lambda n: "same")
        self.make(tmp_path)
        self.make(tmp_path)
        with pytest.raises(RankDirError):
            self.make(tmp_path)

    def test_boot_ids_differ(self) -> None:
        assert make_boot_id() != make_boot_id()


class TestBatch:
    def make(self, **change: Any) -> Any:
        fields: dict[str, Any] = {
            "forward_mode": SimpleNamespace(name="EXTEND"),
            "rids": ["xtr-a", "b"],
            "extend_seq_lens_cpu": [3, 4],
            "extend_prefix_lens_cpu": torch.tensor([0, 5]),
            "input_ids": torch.arange(7),
        }
        return SimpleNamespace(**{**fields, **change})

    def test_host_tensors_become_lists(self) -> None:
        batch = sglang_api.read_batch(self.make())
        assert (batch.extend_lens, batch.prefix_lens) == ([3, 4], [0, 5])
        assert (batch.live_rows, batch.prompt_lens) == (None, None)

    @pytest.mark.parametrize(
        "name", ["num_token_non_padded_cpu", "global_num_token_non_padded_cpu"]
    )
    def test_live_rows_have_a_name_per_release(self, name: str) -> None:
        assert sglang_api.read_batch(self.make(**{name: 7})).live_rows == 7
        assert sglang_api.read_batch(self.make(**{name: 0})).live_rows is None

    def test_what_moved_is_named(self) -> None:
        batch = self.make()
        del batch.extend_seq_lens_cpu
        with pytest.raises(EngineError, match=r"no extend_seq_lens_cpu in SGLang 9\.9\.9"):
            sglang_api.read_batch(batch)

    def test_prompt_lengths_travel_with_the_rids(self) -> None:
        forward_batch = self.make()
        requests = [SimpleNamespace(origin_input_ids=[1] * n) for n in (3, 9)]
        schedule_batch = SimpleNamespace(reqs=requests)
        sglang_api.note_prompt_lengths(forward_batch, object, schedule_batch, "runner", key=1)
        assert forward_batch.rids == ["xtr-a", "b"]
        assert isinstance(forward_batch.rids, RequestIds)
        assert sglang_api.read_batch(forward_batch).prompt_lens == [3, 9]

    def test_prompt_lengths_of_a_strange_batch_harm_nobody(self) -> None:
        class Strange:
            @property
            def forward_mode(self) -> Any:
                raise RuntimeError("moved")

        sglang_api.note_prompt_lengths(Strange(), object, SimpleNamespace(reqs=[]))

    def test_prompt_lengths_are_not_needed(self) -> None:
        forward_batch = self.make()
        sglang_api.note_prompt_lengths(forward_batch, object, SimpleNamespace(reqs=[object()]))
        assert forward_batch.rids == ["xtr-a", "b"]
        assert sglang_api.read_batch(forward_batch).prompt_lens is None


@pytest.mark.parametrize(
    ("args", "total", "shares"),
    [
        ({"dp_size": 4}, 4, False),
        ({"dp_size": 4, "enable_dp_attention": True}, 4, True),
        ({"dp_size": 1, "attn_dp_size": 4, "enable_dp_attention": True}, 4, True),
        ({"dp_size": 4, "attn_dp_size": 1}, 4, False),
    ],
)
def test_data_parallel_sizes(
    args: dict[str, Any],
    total: int,
    shares: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sglang_api, "_attention_tp_rank", lambda: 0)
    parallel = SimpleNamespace(attn_dp_rank=2, dp_rank=3)
    monkeypatch.setattr(sglang_api, "_parallel_context", lambda: parallel)
    facts = read_facts(make_runner(tmp_path, **args))
    assert (facts.engine.dp_size, facts.placement.shares_forward) == (total, shares)
    assert facts.placement.rank == (2 if shares else 3)

"""What the plugin relies on in the installed SGLang, so that a release that moves it fails here."""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil

import pytest

from server_patch import engine

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(120),
    # Importing the engine in this process warns of whatever this machine lacks.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("target", [engine.LOAD_MODEL, engine.INIT_FORWARD_BATCH])
def test_hook_targets_exist(target: str) -> None:
    assert callable(pkgutil.resolve_name(target))


def test_the_hook_registry_has_after_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    assert HookType.AFTER
    assert list(inspect.signature(HookRegistry.register).parameters)[:3] == [
        "target",
        "hook",
        "hook_type",
    ]


def test_a_forward_batch_has_every_field_that_is_read() -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    fields = {field.name for field in dataclasses.fields(ForwardBatch)}
    assert fields >= {
        "forward_mode",
        "rids",
        "input_ids",
        "extend_seq_lens_cpu",
        "extend_prefix_lens_cpu",
        "is_extend_in_batch",
        "_original_forward_mode",
    }
    assert fields & {"num_token_non_padded_cpu", "global_num_token_non_padded_cpu"}
    assert list(inspect.signature(ForwardBatch.init_new).parameters)[:2] == [
        "batch",
        "model_runner",
    ]


def test_forward_modes_have_these_names() -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    assert {mode.name for mode in ForwardMode} >= {"EXTEND", "MIXED", "DECODE", "IDLE"}


def test_server_arguments_have_every_setting_that_is_refused_or_told() -> None:
    from sglang.srt.server_args import ServerArgs

    fields = {name for base in ServerArgs.__mro__ for name in vars(base).get("__annotations__", ())}
    assert fields >= {
        "host",
        "port",
        "model_path",
        "tp_size",
        "dp_size",
        "pp_size",
        "attn_cp_size",
        "enable_dp_attention",
        "speculative_algorithm",
        "enable_two_batch_overlap",
        "enable_pdmux",
        "enable_torch_compile",
        "dllm_algorithm",
        "chunked_prefill_size",
        "max_prefill_tokens",
        "disable_radix_cache",
        "quantization",
        "kv_cache_dtype",
    }
    assert fields & {"cuda_graph_config", "disable_piecewise_cuda_graph"}

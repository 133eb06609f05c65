"""How SGLang is started: flags by version, the plugin's variables, and what must not be given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from extractor.core.errors import UsageError
from extractor.servers.sglang_flags import (
    PRESETS,
    EngineOptions,
    PluginOptions,
    ServeOptions,
    graph_arguments,
)
from server_patch.settings import Settings, WriterSettings


def engine(**changes: Any) -> EngineOptions:
    return EngineOptions(model="m", **changes)


@pytest.mark.parametrize(
    ("version", "old"),
    [
        ("0.5.11", True), ("0.5.13", True), ("0.5.13.post1", True), ("0.5.14", False),
        ("0.5.15.post1", False), ("0.5.15rc1", False), ("0.5.23", False), ("0.6.0", False),
        ("1.0", False),
    ],
)  # fmt: skip
def test_graphs_are_off_in_both_phases_in_every_version(version: str, old: bool) -> None:
    found = graph_arguments(version)
    assert len(found) == 2
    assert ("--disable-cuda-graph" in found) is old
    command = engine().command("python", engine_version=version)
    assert set(found) <= set(command)


def test_the_command_is_ours_then_the_presets_then_the_users() -> None:
    command = engine(
        port=1234, host="0.0.0.0", preset="multi-gpu", arguments=("--tp", "8")
    ).command("/py", engine_version="0.5.23")
    assert command[:9] == [
        "/py", "-m", "sglang.launch_server", "--model-path", "m", "--host", "0.0.0.0",
        "--port", "1234",
    ]  # fmt: skip
    assert command[-2:] == ["--tp", "8"]
    assert command.index("--attention-backend") < command.index("--tp")


@pytest.mark.parametrize("radix_cache", [True, False])
def test_the_prefix_cache_is_off_unless_asked_for(radix_cache: bool) -> None:
    command = engine(radix_cache=radix_cache).command("p", engine_version="0.5.23")
    assert ("--disable-radix-cache" in command) is not radix_cache


def test_the_plugin_understands_the_variables_it_is_given(tmp_path: Path) -> None:
    plugin = PluginOptions(
        dump_root=tmp_path, layers="3,31,59", last_kind="both", ring_bytes=1 << 20, ring_slots=3,
        num_writers=5, file_mode="660",
    )  # fmt: skip
    made = ServeOptions(engine=engine(), plugin=plugin).environment(
        {"PATH": "/bin", "NCCL_PROTO": "x"}, boot_id="boot-1"
    )
    assert made["PATH"] == "/bin"
    assert made["NCCL_PROTO"] == "x"
    assert Settings.from_environ(made) == Settings(
        dump_dir=tmp_path, boundaries=(3, 31, 59), last_kind="both", file_mode=0o660,
        writers=WriterSettings(ring_bytes=1 << 20, ring_slots=3, num_writers=5), boot_id="boot-1",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("argument", "secret"),
    [
        ("--api-key", "--api-key"), ("--api-key=sk-1", "--api-key"), ("--api-k", "--api-key"),
        ("--ap=sk-1", "--api-key"), ("--admin-api-key=sk-1", "--admin-api-key"),
        ("--admin", "--admin-api-key"), ("--ssl-keyfile-p=sk-1", "--ssl-keyfile-password"),
    ],
)  # fmt: skip
def test_a_secret_among_the_arguments_is_refused_and_not_repeated(
    argument: str, secret: str
) -> None:
    with pytest.raises(UsageError, match=f"^{secret} after -- .* mode 600 .* --config") as caught:
        engine(arguments=("--tp-size", "2", argument, "sk-1"))
    assert "sk-1" not in str(caught.value)
    assert ("--api-key-file" in str(caught.value)) is (secret == "--api-key")


def test_arguments_that_begin_alike_are_none() -> None:
    assert engine(arguments=("--ssl-keyfile", "f", "--a")).arguments


def test_the_server_reads_its_key_from_a_file() -> None:
    command = engine(arguments=("--tp-size", "2")).command(
        "p", engine_version="0.5.23", key_path=Path("/key.yaml")
    )
    assert command[-4:] == ["--config", "/key.yaml", "--tp-size", "2"]


def test_the_server_does_not_inherit_our_variable() -> None:
    options = ServeOptions(engine=engine(), plugin=PluginOptions())
    made = options.environment({"EXTRACTOR_API_KEY": "sk-1", "HOME": "/"}, boot_id="b")
    assert "EXTRACTOR_API_KEY" not in made
    assert made["HOME"] == "/"


def test_a_relative_dump_root_is_made_absolute() -> None:
    made = PluginOptions(dump_root=Path("here")).environment(boot_id="b")
    assert Path(made["SGLANG_HS_DUMP_DIR"]).is_absolute()


def test_a_preset_sets_what_it_says() -> None:
    assert engine(preset="multi-gpu").environment()["NCCL_PROTO"] == "LL"
    assert "NCCL_PROTO" not in engine().environment()
    assert set(PRESETS) == {"none", "multi-gpu"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arguments": ("--model-path", "x")}, "give --model-path to"),
        ({"arguments": ("--port=1",)}, "give --port to"),
        ({"arguments": ("--tp", "2", "--speculative-algorithm=EAGLE")}, "--speculative-algorithm"),
        ({"preset": "other"}, "unknown preset"),
    ],
)
def test_an_engine_that_cannot_work_is_refused_before_anything_starts(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        engine(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": "a,b"}, "a,b"),
        ({"layers": "3,2"}, "ascend"),
        ({"last_kind": "none"}, "post, pre or both"),
        ({"file_mode": "999"}, "octal"),
        ({"ring_slots": 1}, "2..64"),
    ],
)
def test_a_capture_that_cannot_work_is_refused_before_anything_starts(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        PluginOptions(**changes)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:30000"),
        ("0.0.0.0", "http://127.0.0.1:30000"),
        ("::1", "http://[::1]:30000"),
        ("::", "http://[::1]:30000"),
        ("fe80::1%eth0", "http://[fe80::1%eth0]:30000"),
        ("gpu-1.lan", "http://gpu-1.lan:30000"),
    ],
)
def test_the_address_of_a_server_is_a_url_that_reaches_it(host: str, url: str) -> None:
    started = engine(host=host)
    assert started.url == url
    command = started.command("p", engine_version="0.5.23")
    assert command[command.index("--host") + 1] == host


@pytest.mark.parametrize("host", ["", "[::1]", "256.1.1.1", "-x-", "a b", "http://gpu-1"])
def test_an_invalid_host_is_refused(host: str) -> None:
    with pytest.raises(UsageError, match="--host"):
        engine(host=host)

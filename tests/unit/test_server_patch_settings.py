"""The environment variables of the plugin."""

from __future__ import annotations

from pathlib import Path

import pytest

from server_patch.settings import Settings, SettingsError, WriterSettings

ROOT = {"SGLANG_HS_DUMP_DIR": "/dev/shm/x"}


def parse(**variables: str) -> Settings:
    settings = Settings.from_environ(ROOT | {f"SGLANG_HS_{k}": v for k, v in variables.items()})
    assert settings is not None
    return settings


@pytest.mark.parametrize("environ", [{}, {"SGLANG_HS_DUMP_DIR": " "}, {"SGLANG_HS_LAST": "post"}])
def test_without_a_dump_dir_there_are_no_settings(environ: dict[str, str]) -> None:
    assert Settings.from_environ(environ) is None


def test_defaults() -> None:
    assert parse() == Settings(
        dump_dir=Path("/dev/shm/x"),
        boundaries=None,
        last_kind="post",
        rid_prefix="xtr-",
        writers=WriterSettings(ring_bytes=None, ring_slots=4, num_writers=None),
        file_mode=0o600,
        boot_id=None,
        log_level=None,
    )


def test_everything_set() -> None:
    settings = parse(
        BOUNDARIES="3,31,59",
        LAST="both",
        RID_PREFIX="mine-",
        RING_BYTES="1048576",
        RING_SLOTS="8",
        WRITERS="2",
        FILE_MODE="660",
        BOOT_ID="run-1",
        LOG_LEVEL="debug",
    )
    assert settings.boundaries == (3, 31, 59)
    assert settings.last_kind == "both"
    assert settings.rid_prefix == "mine-"
    assert settings.writers == WriterSettings(ring_bytes=1 << 20, ring_slots=8, num_writers=2)
    assert (settings.file_mode, settings.directory_mode) == (0o660, 0o770)
    assert settings.boot_id == "run-1"
    assert settings.log_level == "DEBUG"


@pytest.mark.parametrize(("mode", "directory"), [("600", 0o700), ("640", 0o750), ("664", 0o775)])
def test_who_reads_files_may_search_directories(mode: str, directory: int) -> None:
    assert parse(FILE_MODE=mode).directory_mode == directory


@pytest.mark.parametrize(
    ("variable", "value", "bound"),
    [
        ("DUMP_DIR", "relative", "absolute"),
        ("BOUNDARIES", "3,x", "eagle3"),
        ("BOUNDARIES", "3,", "eagle3"),
        ("BOUNDARIES", "-1,3", ">= 0, has -1"),
        ("BOUNDARIES", "5,3", "ascend"),
        ("BOUNDARIES", "3,3", "not repeat"),
        ("LAST", "none", "post, pre or both"),
        ("RING_BYTES", "many", "whole number"),
        ("RING_BYTES", "100", ">= 65536"),
        ("RING_SLOTS", "1", r"2\.\.64"),
        ("WRITERS", "0", "> 0"),
        ("WRITERS", "65", r"1\.\.64"),
        ("FILE_MODE", "8", "octal"),
        ("FILE_MODE", "400", "600"),
        ("FILE_MODE", "700", "600"),
        ("FILE_MODE", "602", "600, 640, 644, 660 or 664"),
        ("FILE_MODE", "666", "600, 640, 644, 660 or 664"),
        ("BOOT_ID", "../x", "letters"),
        ("BOOT_ID", ".hidden", "letter or digit"),
        ("LOG_LEVEL", "verbose", "DEBUG, WARNING"),
    ],
)
def test_bad_values_name_the_variable_and_the_bound(variable: str, value: str, bound: str) -> None:
    with pytest.raises(SettingsError, match=f"SGLANG_HS_{variable}.*{bound}"):
        parse(**{variable: value})


@pytest.mark.parametrize(
    ("layers", "wanted"), [(61, (2, 30, 58)), (32, (2, 16, 29)), (8, (2, 4, 5))]
)
def test_eagle3_boundaries(layers: int, wanted: tuple[int, ...]) -> None:
    assert parse(BOUNDARIES="eagle3").resolve_boundaries(layers) == wanted


def test_eagle3_needs_enough_layers() -> None:
    with pytest.raises(SettingsError, match=r"\[2, 2, 1\].*4 layers"):
        parse().resolve_boundaries(4)


def test_the_state_after_the_last_layer_is_a_last_kind() -> None:
    settings = parse(BOUNDARIES="3,31,61")
    assert settings.resolve_boundaries(62) == (3, 31, 61)
    with pytest.raises(SettingsError, match="SGLANG_HS_LAST=pre"):
        settings.resolve_boundaries(61)
    with pytest.raises(SettingsError, match=r"0\.\.39.*has 61"):
        settings.resolve_boundaries(40)

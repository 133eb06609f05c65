"""Tables, amounts, provenance, and the examples in docstrings."""

from __future__ import annotations

import doctest
import importlib
import json
import pkgutil
from pathlib import Path

import pytest
from helpers import make_identity, make_start
from hypothesis import given
from hypothesis import strategies as st

import extractor.shards.output_dir
from extractor.core.humanize import amount, parse_bytes, table
from extractor.shards.dataset import dataset_document
from extractor.system.files import file_system_type

PACKAGES = ("extractor", "manifest", "prompts")
# The plugin's modules import torch and sglang; these two are what the client shares.
MODULES = [
    *(
        module.name
        for package in PACKAGES
        for module in pkgutil.walk_packages(
            importlib.import_module(package).__path__, f"{package}."
        )
        if not module.name.endswith("__main__")
    ),
    "server_patch.dump_format",
    "server_patch.settings",
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_are_true(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_some_docstrings_have_examples() -> None:
    attempted = sum(doctest.testmod(importlib.import_module(name)).attempted for name in MODULES)
    assert attempted >= 10


def test_columns_are_aligned() -> None:
    assert table([("stored", "1,000"), ("a", "7")]) == "stored  1,000\na           7"
    assert table([]) == ""


@given(st.floats(0, 2**60))
def test_amounts_are_readable_again(size: float) -> None:
    text = amount(size)
    assert len(text) <= 14
    assert parse_bytes(text) == pytest.approx(size, rel=0.06, abs=1)


@pytest.mark.parametrize("text", ["", "lots", "-1", "1.5X", "GiB", "nan", "inf", "1e400", "1e308T"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        parse_bytes(text)


def test_provenance_names_layers_in_both_conventions() -> None:
    identity = make_identity(boundaries=(2, 4, 5), inputs=("a", "b"))
    starts = [
        make_start(0),
        make_start(1, session=1, engine_version="0.5.23", accepted=("weights",)),
    ]
    document = json.loads(dataset_document(identity, starts))
    assert document["boundaries"] == [2, 4, 5]
    assert document["layer_outputs"] == [1, 3, 4]
    assert document["engine_version"] == "0.5.23"
    assert [session["session"] for session in document["sessions"]] == [0, 1]
    (served,) = document["sessions"][1]["servers"]
    assert served["engine_version"] == "0.5.23"
    assert served["accepted"] == ["weights"]
    for field, value in identity.to_document().items():
        assert document[field] == (list(value) if isinstance(value, tuple) else value)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("ext4", None), ("xfs", None), ("overlay", None), ("", None),
        ("tmpfs", "lost with this machine's next start"),
        ("nfs4", "network file system"), ("fuse.sshfs", "network file system"),
        ("lustre", "network file system"), ("cifs", "network file system"),
    ],
)  # fmt: skip
def test_a_manifest_where_it_may_be_lost_is_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, told: str | None
) -> None:
    monkeypatch.setattr(extractor.shards.output_dir, "file_system_type", lambda path: kind)
    warning = extractor.shards.output_dir.manifest_warning(tmp_path)
    assert warning is None if told is None else told in str(warning)


def test_the_kernel_tells_what_file_system_a_path_is_on() -> None:
    assert file_system_type(Path("/dev/shm")) == "tmpfs"
    assert file_system_type(Path("/proc")) == "proc"

"""What every kind of test shares. This file also puts `tests/` on the import path."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from helpers import Notes
from hypothesis import settings

# The commands that tests start inherit what `nohup` ignores, and a run respects that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The same examples every time, and no verdict by the speed of the machine. "loop" is `make test`.
settings.register_profile("full", deadline=None, derandomize=True)
settings.register_profile("loop", settings.get_profile("full"), max_examples=20)
settings.load_profile("full")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker starts all real servers: they are shared, and two at once starve each other."""
    for item in items:
        if item.get_closest_marker("sglang"):
            item.add_marker(pytest.mark.xdist_group("sglang"))


@pytest.fixture
def notes() -> Notes:
    """A reporter that remembers what it was told."""
    return Notes()


@pytest.fixture
def dump_root(tmp_path: Path) -> Path:
    """Where servers of this test dump. An ordinary folder: nothing here depends on tmpfs."""
    root = tmp_path / "dumps"
    root.mkdir()
    return root


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for localhost and its key, in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    directory = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
            "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
            "subjectAltName=DNS:localhost,IP:::1", "-keyout", "key.pem", "-out", "c.pem",
        ],
        cwd=directory,
        check=True,
        capture_output=True,
    )  # fmt: skip
    whole = directory / "both.pem"
    whole.write_text((directory / "key.pem").read_text() + (directory / "c.pem").read_text())
    return whole

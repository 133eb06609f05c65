"""The command line as a user has it, a fake server, and one real server for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from acceptance.real import Real, real_server
from acceptance.tool import Fake, Server, Tool, fake_server


@pytest.fixture
def tool(tmp_path: Path) -> Iterator[Tool]:
    tool = Tool(cwd=tmp_path)
    yield tool
    tool.stop_all()


@pytest.fixture
def fake(dump_root: Path) -> Iterator[Fake]:
    with fake_server(dump_root) as server:
        yield server


@pytest.fixture(scope="package")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    """Takes some 20 seconds to start, so all tests share it."""
    with real_server(tmp_path_factory.mktemp("real")) as server:
        yield server


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.sglang)])
def server(request: pytest.FixtureRequest) -> Server:
    """The fake server, then the real one: what holds of one must hold of the other."""
    found: Server = request.getfixturevalue(request.param)
    return found

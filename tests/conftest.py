"""What every kind of test shares. This file also puts `tests/` on the import path."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from helpers import Notes
from hypothesis import settings

import extractor.session
from extractor.retry import RetryPolicy

# The same examples every time, and no verdict by the speed of the machine.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


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


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries follow each other without the usual seconds in between."""
    policy = partial(RetryPolicy, base_delay_s=0.001, max_delay_s=0.01)
    monkeypatch.setattr(extractor.session, "RetryPolicy", policy)

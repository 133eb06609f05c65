"""What cannot be captured is refused with a reason, and the server serves on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rig.server import ServerDied

from plugin.conftest import bind_ranks
from plugin.serving import serve
from server_patch.dump_format import FAILED_NAME

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(480)]


def test_a_boundary_the_model_does_not_have(
    model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    root = tmp_path / "dumps"
    with serve(model_dir("llama"), root, boundaries="2,8") as server:
        assert [path.name for path in server.directory.iterdir()] == [FAILED_NAME]
        reason = json.loads((server.directory / FAILED_NAME).read_bytes())["reason"]
        assert "SGLANG_HS_BOUNDARIES asks for 8" in reason
        assert "SGLANG_HS_LAST=pre" in reason
        assert len(server.generate("xtr-0", [3, 4, 5])["output_ids"]) == 1
        assert [path.name for path in server.directory.iterdir()] == [FAILED_NAME]


def reasons(root: Path) -> list[str]:
    return [json.loads(path.read_bytes())["reason"] for path in root.glob(f"*/*/{FAILED_NAME}")]


def test_pipeline_parallel(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    root = tmp_path / "dumps"
    with serve(
        model_dir("llama"),
        root,
        boundaries="eagle3",
        args=("--pp-size", "2"),
        env=bind_ranks(2),
    ) as server:
        told = reasons(root)
        assert told and all("use --pp-size 1 and more tensor parallel" in text for text in told)
        assert len(server.generate("xtr-0", [3, 4, 5])["output_ids"]) == 1
        assert list(server.dumps()) == []


def test_a_speculative_drafter(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """On a CPU the engine's own drafter cannot run, and ends the server; we have told before."""
    root = tmp_path / "dumps"
    with (
        pytest.raises(ServerDied, match="sgl_kernel"),
        serve(
            model_dir("llama"),
            root,
            boundaries="eagle3",
            args=("--speculative-algorithm", "NGRAM"),
        ),
    ):
        pass
    assert reasons(root) == [
        "a speculative drafter is configured: drop --speculative-algorithm",
    ]


def test_a_place_that_cannot_be_written(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """/proc takes no directory from anybody. There is no place for the reason but the log."""
    root = Path("/proc/hidden-states")
    log = tmp_path / "server.log"
    with serve(model_dir("llama"), root, boundaries="eagle3", log_path=log) as server:
        assert len(server.generate("xtr-0", [3, 4, 5])["output_ids"]) == 1
    assert "hidden states: nothing will be written" in log.read_text()

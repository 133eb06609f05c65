"""What cannot be captured is refused with a reason, and the server serves on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from plugin.serving import serve
from server_patch.dump_format import FAILED_NAME

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(240)]


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

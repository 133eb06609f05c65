"""One request on a real server, followed through the server's log by its rid."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from plugin.serving import Serving, serve, wait_for
from server_patch.dump_format import dump_name

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(480)]

PLUGIN_LINE = re.compile(r"hidden states: (rid=.*)")


def lines_of(server: Serving, rid: str) -> list[str]:
    found = map(PLUGIN_LINE.search, server.log_path.read_text().splitlines())
    return [match[1] for match in found if match and f"rid={rid} " in match[1]]


def test_a_request_is_followed_by_its_rid(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    with serve(
        model_dir("llama"),
        tmp_path / "dumps",
        boundaries="eagle3",
        args=("--chunked-prefill-size", "32"),
        env={"SGLANG_HS_LOG_LEVEL": "DEBUG"},
    ) as server:
        server.generate("foreign", list(range(3, 60)))
        server.generate("xtr-followed", list(range(3, 60)))
        server.take_sample("xtr-followed", 57)
        wait_for(lambda: len(lines_of(server, "xtr-followed")) >= 4)
        assert sorted(lines_of(server, "xtr-followed")) == [
            "rid=xtr-followed captured: forward 1, rows 32, start 0",
            "rid=xtr-followed captured: forward 2, rows 25, start 32",
            "rid=xtr-followed written: dump 0, rows 32, start 0",
            "rid=xtr-followed written: dump 1, rows 25, start 32",
        ]
        (server.directory / dump_name(2)).mkdir()
        server.generate("xtr-blocked", list(range(3, 20)))
        wait_for(lambda: len(lines_of(server, "xtr-blocked")) >= 2)
        captured, failed = lines_of(server, "xtr-blocked")
        assert captured == "rid=xtr-blocked captured: forward 3, rows 17, start 0"
        assert failed.startswith("rid=xtr-blocked failed: error record 2, start 0: writing failed")
        assert lines_of(server, "foreign") == []

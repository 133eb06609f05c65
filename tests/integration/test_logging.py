"""What the client logs: one prompt can be followed from its row to its stored sample."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from helpers import Notes, make_prompts, options_for, run, write_prompts

from extractor.testing.fake_server import FakeServer
from extractor.testing.faults import Fault, faults_once

#: As docs/observability.md lists them.
STAGES = (
    "admitted", "sent", "answered", "dump arrived", "queued", "copied", "committed",
    "dumps removed",
)  # fmt: skip
#: Stages before the prompt has a rid.
WITHOUT_RID = ("admitted",)


def stages_of(messages: list[str], field: str) -> list[str]:
    """The stages that name `field`, as in rid=..., in their order."""
    named = [message for message in messages if re.search(rf"\b{re.escape(field)}(?!\S)", message)]
    return [re.split(r" (?:rid|row)=", message)[0] for message in named]


async def test_one_prompt_is_followed_from_its_row_to_its_stored_sample(
    tmp_path: Path, dump_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="extractor")
    prompts = write_prompts(tmp_path / "p.jsonl", make_prompts(12))
    async with FakeServer(dump_root).running() as server:
        await run(options_for(server, prompts, tmp_path / "out"), Notes())
        (rid,) = [rid for rid in server.requests if rid.endswith("-1-1")]
    messages = [record.getMessage() for record in caplog.records]
    of_rid = [stage for stage in stages_of(messages, f"rid={rid}") if stage in STAGES]
    assert of_rid == [stage for stage in STAGES if stage not in WITHOUT_RID]
    of_row = [stage for stage in stages_of(messages, "row=1") if stage in STAGES]
    assert of_row == [stage for stage in STAGES if stage != "dump arrived"]


async def test_a_sample_that_is_not_stored_is_logged_with_the_reason(
    tmp_path: Path, dump_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="extractor")
    prompts = write_prompts(tmp_path / "p.jsonl", make_prompts(3))
    faults = faults_once({2: Fault.NONFINITE})
    async with FakeServer(dump_root, faults=faults).running() as server:
        await run(options_for(server, prompts, tmp_path / "out"), Notes())
    messages = [record.getMessage() for record in caplog.records]
    (message,) = [message for message in messages if message.startswith("not stored ")]
    assert re.match(rf"not stored rid={server.requests[2]} row=\d reason=nonfinite: ", message)

"""The id of the weights: over all ranks, after updates, and when a rank has no fingerprint."""

from __future__ import annotations

import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from server_patch import weights as module
from server_patch.dump_format import WeightsInfo
from server_patch.fingerprint import combine, fingerprint
from server_patch.weights import UNKNOWN, Measured, Ranks, Weights


def make_model(value: float = 0.0) -> torch.nn.Module:
    model = torch.nn.Module()
    model.register_buffer("w", torch.full((3,), float(value)))
    return model


def find(content: str = "c0ffee", boot_id: str = "boot") -> Weights:
    found = WeightsInfo(id=content, layout="l", seconds=0.25)
    return Weights(boot_id=boot_id, found=found, version="default")


@pytest.fixture(autouse=True)
def first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_rounds", iter([0] * 100))


class Broken:
    def named_modules(self) -> Any:
        raise RuntimeError("no weights here")


def measure(store: Any, rank: int, model: Any, ranks: tuple[int, ...]) -> Measured:
    return Measured(lambda: Ranks(rank=rank, ranks=ranks, store=store), model)


def test_one_rank_needs_no_store() -> None:
    found = measure(None, 0, make_model(), (0,)).gather()
    whole = combine([fingerprint(make_model())])
    assert (found.id, found.layout) == (whole.content, whole.layout)
    assert found.seconds is not None and found.seconds > 0


def test_ranks_that_measure_at_different_times_get_the_same_id() -> None:
    store = torch.distributed.HashStore()
    models = [make_model(0), make_model(1), make_model(2)]
    ranks = (4, 5, 6)  # a group that is only a part of the world

    def run(index: int) -> WeightsInfo:
        return measure(store, ranks[index], models[index], ranks).gather()

    with ThreadPoolExecutor(max_workers=3) as pool:
        found = list(pool.map(run, (2, 0, 1)))
    whole = combine(list(map(fingerprint, models)))
    assert {(each.id, each.layout) for each in found} == {(whole.content, whole.layout)}


def test_a_rank_that_cannot_compute_leaves_all_without_an_id(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = torch.distributed.HashStore()
    broken = measure(store, 1, Broken(), (0, 1))
    with caplog.at_level(logging.WARNING):
        assert measure(store, 0, make_model(), (0, 1)).gather() == UNKNOWN
        assert broken.gather() == UNKNOWN
    assert "rank 1: RuntimeError('no weights here')" in caplog.text
    assert "goes unnoticed" in caplog.text


def test_a_rank_that_publishes_nothing_does_not_hang_the_others(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, a second node on which the plugin is not set up."""
    monkeypatch.setattr(module, "_PATIENCE_S", 0.01)
    with caplog.at_level(logging.WARNING):
        assert measure(torch.distributed.HashStore(), 0, make_model(), (0, 1)).gather() == UNKNOWN
    assert "rank 1 has not published its part" in caplog.text
    assert "SGLANG_HS_DUMP_DIR" in caplog.text


def test_missing_ranks_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    def find_ranks() -> Ranks:
        raise RuntimeError("no such group")

    with caplog.at_level(logging.WARNING):
        assert Measured(find_ranks, make_model()).gather() == UNKNOWN
    assert "no such group" in caplog.text


GLOO = """
import sys, torch
from datetime import timedelta
from server_patch.weights import Measured, Ranks
rank, path = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{path}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
)
model = torch.nn.Module()
model.register_buffer("w", torch.full((3,), float(rank)))
store = torch.distributed.distributed_c10d._get_default_store()
measured = Measured(lambda: Ranks(rank=rank, ranks=[0, 1], store=store), model)
if rank == 0 or sys.argv[3] == "all":
    print(measured.gather().id)
torch.distributed.barrier()  # the engine's next collective
"""


@pytest.mark.slow
@pytest.mark.parametrize("who", ["all", "writer"])
def test_real_processes_agree_and_meet_in_the_next_collective(tmp_path: Path, who: str) -> None:
    """Also when only one rank writes, so that only that rank waits for the others."""
    command = [sys.executable, "-c", GLOO]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), who], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    answers = [process.communicate(timeout=50)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    expected = combine([fingerprint(make_model(0)), fingerprint(make_model(1))]).content
    assert answers == ([expected] * 2 if who == "all" else [expected, ""])


def test_each_update_gives_a_new_id_that_all_ranks_of_one_server_share() -> None:
    weights, other_rank, other_server = find(), find(), find(boot_id="other")
    assert (weights.info.id, weights.info.layout, weights.info.seconds) == ("c0ffee", "l", 0.25)
    ids = [weights.info.id]
    for each in (weights, other_rank, other_server):
        each.updated()
    assert weights.info.id == other_rank.info.id != other_server.info.id
    ids.append(weights.info.id)
    weights.updated()
    ids.append(weights.info.id)
    assert len(set(ids)) == 3
    assert all(each is not None and each.startswith("c0ffee") for each in ids)
    assert [len(each or "") for each in ids] == [6, 15, 15]


def test_an_update_of_unknown_weights_is_seen() -> None:
    weights = Weights(boot_id="boot")
    assert weights.info.id is None
    weights.updated()
    assert weights.info.id is not None and weights.info.id.startswith("unknown+")


def test_watchers_are_called_for_updates_labels_and_late_weights() -> None:
    weights = Weights(boot_id="boot", version="default")
    heard: list[tuple[str | None, str | None]] = []
    weights.watch(lambda: heard.append((weights.info.id, weights.info.version)))
    weights.labelled("default")
    assert heard == []
    weights.labelled("v2")
    weights.loaded(WeightsInfo(id="c", layout="l", seconds=1))
    assert heard == [(None, "v2"), ("c", "v2")]

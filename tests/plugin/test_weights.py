"""READY.json and dumps carry the id of the weights, over restarts, checkpoints and live updates."""

from __future__ import annotations

import json
import shutil
import urllib.error
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from plugin.serving import Serving, serve, update_weights, wait_for

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(480)]


def changed_copy(model: Path, target: Path) -> Path:
    """A copy of `model` with one bit of one weight flipped."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, target)
    file = target / "model.safetensors"
    tensors = load_file(file)
    weight = tensors["model.layers.3.mlp.down_proj.weight"]
    weight.view(torch.int32)[5, 7] ^= 1
    save_file(tensors, file, metadata={"format": "pt"})
    return target


def weights_of_dump(server: Serving, rid: str) -> str | None:
    server.generate(rid, list(range(3, 30)))
    wait_for(lambda: [d for _, d in server.dumps() if d.header.rid == rid])
    (found,) = {dump.header.weights for _, dump in server.dumps() if dump.header.rid == rid}
    return found


def test_weights_are_named_by_their_content_and_updates_are_seen(
    model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    model = model_dir("llama")
    changed = changed_copy(model, tmp_path / "changed")

    def start(name: str, model: Path) -> AbstractContextManager[Serving]:
        return serve(model, tmp_path / name, boundaries="eagle3")

    with start("first", model) as server:
        (loaded,) = server.readies()
        assert loaded.weights.id is not None and len(loaded.weights.id) == 32
        assert loaded.weights.version == "default"
        assert loaded.engine.settings["device"] == "cpu"
        assert json.loads(loaded.engine.settings["rope"])["max_position_embeddings"] == 8192
        assert weights_of_dump(server, "xtr-before") == loaded.weights.id

        assert update_weights(server, changed, weight_version="v2")["success"]
        (updated,) = server.readies()
        assert (updated.weights.id or "").startswith(f"{loaded.weights.id}+")
        assert updated.weights.version == "v2"
        assert weights_of_dump(server, "xtr-after") == updated.weights.id
        answer = server.generate("xtr-label", [3, 4, 5])
        assert answer["meta_info"]["weight_version"] == "v2"

        with pytest.raises(urllib.error.HTTPError):  # it may have changed some weights first
            update_weights(server, tmp_path / "nothing-here")
        (failed,) = server.readies()
        assert failed.weights.id not in (loaded.weights.id, updated.weights.id)
        assert failed.weights.version == "v2"

    with start("again", shutil.copytree(model, tmp_path / "copy")) as server:
        (again,) = server.readies()
        assert (again.weights.id, again.weights.layout) == (
            loaded.weights.id,
            loaded.weights.layout,
        )
        assert dict(again.engine.settings) == dict(loaded.engine.settings)

    with start("changed-from-start", changed) as server:
        (other,) = server.readies()
        assert other.weights.id != loaded.weights.id
        assert other.weights.layout == loaded.weights.layout

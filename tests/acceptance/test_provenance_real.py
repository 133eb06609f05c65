"""A real server with a replaced checkpoint under the same path, and with another KV cache dtype."""

from __future__ import annotations

import json
import shutil
import struct
import urllib.request
from pathlib import Path

import orjson
import pytest
from helpers import (
    dumps_under,
    make_prompts,
    servers_of,
    write_prompts,
)

from acceptance.real import Real, real_server, stored
from acceptance.tool import Tool, wait_until

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

NUM_ROWS = 400


def flip_one_bit(checkpoint: Path) -> None:
    """Flip the lowest bit of one weight: the difference in the states is negligible."""
    data = bytearray(checkpoint.read_bytes())
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    (name,) = (name for name in header if name.endswith("layers.1.mlp.up_proj.weight"))
    begin, _ = header[name]["data_offsets"]
    data[8 + length + begin] ^= 1
    checkpoint.write_bytes(data)


def assert_a_live_update_ends_a_run(tmp_path: Path, tool: Tool, server: Real) -> None:
    """As a trainer does it that shares the server: it loads other weights in between."""
    prompts = make_prompts(3000, longest=120, vocabulary=500)
    path = write_prompts(tmp_path / "live.jsonl", prompts)
    out = tmp_path / "live"
    other = shutil.copytree(tmp_path / "llama", tmp_path / "other")
    (checkpoint,) = other.glob("*.safetensors")
    flip_one_bit(checkpoint)
    running = tool.start_run(path, out, server)
    wait_until(lambda: stored(out) >= 20 or running.poll() is not None, what="20 rows stored")
    body = json.dumps({"model_path": str(other)}).encode()
    request = urllib.request.Request(
        f"{server.url}/update_weights_from_disk", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["success"] is True
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 2, errors
    assert "were updated during the run" in errors
    num_stored = stored(out)
    assert 20 <= num_stored < len(prompts)
    again = tool.run(path, out, server)
    assert again.returncode == 2, again.stderr
    assert "  weights: was " in again.stderr
    assert stored(out) == num_stored
    assert dumps_under(server.root) == []


def test_a_checkpoint_that_was_replaced_is_refused_by_name_until_the_old_one_serves_again(
    tmp_path: Path, tool: Tool
) -> None:
    prompts = make_prompts(NUM_ROWS, longest=120, vocabulary=500)
    path = write_prompts(tmp_path / "p.jsonl", prompts)
    out = tmp_path / "out"
    with real_server(tmp_path) as server:
        running = tool.start_run(path, out, server)
        wait_until(lambda: stored(out) >= 20 or running.poll() is not None, what="20 rows stored")
        running.terminate()
        running.communicate(timeout=60)
    num_stored = stored(out)
    assert 20 <= num_stored < NUM_ROWS

    (checkpoint,) = (tmp_path / "llama").glob("*.safetensors")
    original = checkpoint.read_bytes()
    flip_one_bit(checkpoint)
    with real_server(tmp_path, extra_args=("--kv-cache-dtype", "fp8_e5m2")) as server:
        refused = tool.run(path, out, server)
        assert refused.returncode == 2, refused.stderr
        assert f"does not compute what {out} holds" in refused.stderr
        assert "  weights: was " in refused.stderr
        assert "  kv_cache_dtype: was " in refused.stderr and "is fp8_e5m2" in refused.stderr
        assert dumps_under(server.root) == []
    assert stored(out) == num_stored

    checkpoint.write_bytes(original)
    with real_server(tmp_path) as server:
        finished = tool.run(path, out, server)
        assert finished.returncode == 0, finished.stderr
        assert_a_live_update_ends_a_run(tmp_path, tool, server)
    verified = tool("verify", out)
    assert verified.returncode == 0, verified.stdout
    document = orjson.loads((out / "dataset.json").read_bytes())
    first, second = (session["servers"][0] for session in document["sessions"])
    assert first["boot_id"] != second["boot_id"]
    assert len(first["weights"]) == 32
    assert first["weights"] == second["weights"]
    assert first["canary_error"] is None
    assert 0 <= second["canary_error"] < 1e-5  # float32: batches differ from run to run
    assert set(servers_of(out).values()) == {0, 1}

"""A server with the plugin answers every request exactly as one without it, whatever befalls it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from plugin.serving import Serving, serve, update_weights, wait_for
from server_patch.dump_format import dump_name

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(480)]

ARGS = ("--sleep-on-idle", "--chunked-prefill-size", "32", "--random-seed", "7")
#: What differs between two runs of anything.
VOLATILE = ("latency", "time", "_ts", "duration", "throughput")


@pytest.fixture(scope="module")
def patched(
    model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    with serve(
        model_dir("llama"), tmp_path_factory.mktemp("dumps"), boundaries="eagle3", args=ARGS
    ) as server:
        yield server


def make_requests() -> list[dict[str, Any]]:
    """50 requests of all kinds, every second with our rid prefix."""
    generator = random.Random(11)
    requests: list[dict[str, Any]] = []
    for i in range(50):
        sampling: dict[str, Any] = {"max_new_tokens": 1 + i % 7, "temperature": 0}
        if i % 3 == 1:
            sampling.update(temperature=0.8, top_p=0.9, sampling_seed=i)
        elif i % 3 == 2:
            sampling.update(temperature=1.0)  # the server's own seed
        request: dict[str, Any] = {
            "rid": f"{'xtr-' if i % 2 else 'other-'}{i}",
            "ids": [generator.randrange(3, 500) for _ in range(generator.randrange(2, 90))],
            "sampling_params": sampling,
        }
        if i % 5 == 0:
            request.update(return_logprob=True, top_logprobs_num=3, logprob_start_len=0)
        if i % 4 == 3:
            # The prefix of an earlier request of ours: what our capture left in the cache.
            request.update(ids=requests[i - 2]["ids"][:20] + request["ids"], extra_key="shared")
        elif i % 4 == 1:
            request.update(extra_key="shared")
        requests.append(request)
    return requests


def stable(value: Any) -> Any:
    """`value` without the measurements of time."""
    if isinstance(value, dict):
        return {
            key: stable(part)
            for key, part in value.items()
            if not any(word in key for word in VOLATILE)
        }
    return value


def ask_all(server: Serving) -> list[Any]:
    return [stable(server.generate(**request)) for request in make_requests()]


def test_answers_equal_those_of_a_plain_server_bit_for_bit(
    patched: Serving, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    with_plugin = ask_all(patched)
    with serve(
        model_dir("llama"), tmp_path / "none", boundaries="eagle3", args=ARGS, plugin=False
    ) as plain:
        without = ask_all(plain)
        # An update in place gets the same reply, and later replies are equal as well.
        replies = [update_weights(server, model_dir("llama")) for server in (patched, plain)]
        after = [
            stable(server.generate("xtr-after-update", list(range(3, 60))))
            for server in (patched, plain)
        ]
        assert not (tmp_path / "none").exists()
    assert [answer["meta_info"]["id"] for answer in without] == [
        request["rid"] for request in make_requests()
    ]
    assert with_plugin == without
    assert replies[0] == replies[1]
    assert after[0] == after[1]
    patched.take_sample("xtr-after-update", 57)
    wait_for(lambda: len(list(patched.dumps())) >= 25)
    assert {dump.header.rid for _, dump in patched.dumps()} == {
        request["rid"] for request in make_requests() if request["rid"].startswith("xtr-")
    }


def test_a_prefix_cache_hit_shows_as_a_late_start(patched: Serving) -> None:
    """Without a key of its own, the second request computes one row only; the dump says which."""
    ids = list(range(100, 120))
    for attempt in range(2):
        patched.generate(f"xtr-hit-{attempt}", ids, extra_key="hit")
    patched.take_sample("xtr-hit-0", len(ids))
    wait_for(lambda: [d for _, d in patched.dumps() if d.header.rid == "xtr-hit-1"])
    (dump,) = [dump for _, dump in patched.dumps() if dump.header.rid == "xtr-hit-1"]
    assert (dump.header.start, dump.header.rows) == (19, 1)
    assert dump.tensors["input_ids"].tolist() == ids[19:]


def test_a_dump_that_cannot_be_written_becomes_an_error_record(patched: Serving) -> None:
    latest = max(dump.header.counter for _, dump in patched.dumps())
    obstacle = patched.directory / dump_name(latest + 1)
    obstacle.mkdir()
    answer = patched.generate("xtr-blocked", list(range(3, 20)))
    assert len(answer["output_ids"]) == 1
    wait_for(lambda: patched.errors())
    (record,) = patched.errors()
    assert (record.rid, record.start) == ("xtr-blocked", 0)
    assert "IsADirectoryError" in record.reason
    assert not list(patched.directory.glob(".tmp-*"))
    obstacle.rmdir()


def test_the_server_outlives_its_dump_directory(patched: Serving) -> None:
    directory = patched.directory
    shutil.rmtree(directory)
    for i in range(3):
        assert len(patched.generate(f"xtr-gone-{i}", list(range(3, 60)))["output_ids"]) == 1
    assert not directory.exists()
    log = patched.log_path.read_text()
    assert "1 error records could not be written" in log
    assert "rid=" not in log  # lines about requests are off by default

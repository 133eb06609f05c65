"""Every stored state is the right layer's, the right prompt's and the right row's."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import make_prompts, write_prompts

from manifest.states import State
from plugin.client import assert_stored, extract
from plugin.conftest import Case
from plugin.forwards import Forward, forwards_of
from plugin.reference import Reference, relative_error
from plugin.serving import Serving
from plugin.values import assert_is, boundary_of, make_ids

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(480)]

REPOSITORY = Path(__file__).parents[2]
#: Far from a state of another layer or prompt, which is off by tenths.
FAR = 1e-3


def test_states_are_those_of_hugging_face(
    case: Case, serving: Serving, reference: Reference
) -> None:
    ids = make_ids(1, 75)
    answer = serving.generate("xtr-values", ids)
    sample = serving.take_sample("xtr-values", len(ids))
    truth = reference.states(ids)
    assert_is(sample, ids, case.resolved, truth)
    assert [reference.next_token(sample["last"][-1])] == answer["output_ids"]
    # The next layer's states and those of almost the same prompt are something else.
    changed = reference.states([ids[0] + 1, *ids[1:]])
    every = [*truth.boundaries, truth.last_pre]
    for index, boundary in enumerate(case.resolved):
        state = boundary_of(sample, index)
        for neighbour in {max(boundary - 1, 0), boundary + 1} - {boundary}:
            assert relative_error(state, every[neighbour]) > FAR
        assert relative_error(state, changed.boundaries[boundary]) > FAR
    assert relative_error(sample["last"], changed.last) > FAR
    assert relative_error(sample["last"], truth.last_pre) > FAR


def test_ready_says_what_is_captured(case: Case, serving: Serving, reference: Reference) -> None:
    config = reference.config
    readies = serving.readies()
    assert [ready.rank for ready in readies] == list(range(case.num_writers))
    (weights,) = {
        ready.weights.id for ready in readies
    }  # one id for all ranks, known to each writer
    assert weights is not None and len(weights) == 32
    for ready in readies:
        assert ready.capture.boundaries == case.resolved
        assert ready.model.num_layers == config["num_hidden_layers"]
        assert ready.model.hidden_size == config["hidden_size"]
        assert ready.model.vocab_size == config["vocab_size"]
        assert ready.model.architecture == config["architectures"][0]
        assert (ready.model.dtype, ready.capture.last_kind) == ("F32", "both")
        # DP attention divides the chunk among its ranks; it is told as the engine resolved it.
        shares = case.num_writers if "--enable-dp-attention" in case.args else 1
        chunk = case.chunk // shares
        assert (ready.engine.chunked_prefill_size, ready.engine.dp_size) == (
            chunk,
            case.num_writers,
        )
        assert ready.model.quantization == case.quantization
        assert serving.url == f"http://{ready.process.host}:{ready.process.port}"


def test_rows_keep_their_owner_in_crowded_chunks(
    case: Case, serving: Serving, reference: Reference
) -> None:
    """16 prompts of mixed length at once, in small chunks, radix cache on, with foreign requests in
    between that prefill and decode."""
    if case.model == "smollm2":
        pytest.skip("the tiny models tell rows apart as well, a hundred times faster")
    generator = random.Random(2)
    prompts = {f"xtr-crowd-{i}": make_ids(100 + i, generator.randrange(3, 110)) for i in range(16)}
    requests: list[dict[str, object]] = [{"rid": rid, "ids": ids} for rid, ids in prompts.items()]
    for i in range(8):
        ids = make_ids(200 + i, generator.randrange(3, 90))
        sampling = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
        requests.append({"rid": f"foreign-{i}", "ids": ids, "sampling_params": sampling})
    generator.shuffle(requests)
    serving.generate_all(requests)
    writers = {dump.header.rank for _, dump in serving.dumps()}
    assert writers == set(range(case.num_writers))
    for rid, ids in prompts.items():
        sample = serving.take_sample(rid, len(ids))
        assert_is(sample, ids, case.resolved, reference.states(ids))
    assert serving.errors() == []
    assert list(serving.dumps()) == []  # nothing of the foreign requests, nor past a prompt's end


def test_continuations_of_our_requests_are_not_dumped(case: Case, serving: Serving) -> None:
    """A dump holds prompt rows, also when decoding rides in extend batches (mixed chunks)."""
    if case.model == "smollm2":
        pytest.skip("the tiny models decode as well, a hundred times faster")
    sampling = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}
    requests = [
        {"rid": f"xtr-long-{i}", "ids": make_ids(300 + i, 30 + i), "sampling_params": sampling}
        for i in range(12)
    ]
    serving.generate_all(requests)
    for i in range(12):
        serving.take_sample(f"xtr-long-{i}", 30 + i)
    assert list(serving.dumps()) == []


def test_the_client_stores_them(
    case: Case, serving: Serving, reference: Reference, tmp_path: Path
) -> None:
    # Many enough on one of them that a buffer used again too early would show.
    count = 200 if case.model == "llama" else 12
    prompts = make_prompts(count, seed=4, longest=70, vocabulary=500)
    summary = extract(serving, write_prompts(tmp_path / "p.jsonl", prompts), tmp_path / "out")
    assert summary.totals.by_state[State.STORED] == len(prompts)
    assert_stored(tmp_path / "out", prompts, case.resolved, reference)
    assert list(serving.dumps()) == []


def test_no_collective_operation_is_added(
    case: Case, plain_forwards: set[Forward] | None, serving: Serving
) -> None:
    """Every forward of every rank calls the same operations as often as on a plain server. One
    that only some ranks called would hang them all."""
    if plain_forwards is None:
        pytest.skip("one server whose ranks share a forward is enough")
    assert any(forward.operations for forward in plain_forwards)
    assert {forward.mode for forward in plain_forwards} >= {"EXTEND", "DECODE"}
    assert forwards_of(serving) == plain_forwards
    for path, _ in serving.dumps():
        path.unlink()


def test_host_memory_does_not_grow_with_the_requests(case: Case, serving: Serving) -> None:
    if case.chunk != -1:
        pytest.skip("the server that takes whole prompts is the fastest")
    # Fewer would not do: what leaks fills the holes of the heap first, some megabytes.
    command = [
        sys.executable, "-m", "benchmarks.memory",
        "--server", serving.url, "--dump-dir", str(serving.root), "--requests", "3000",
    ]  # fmt: skip
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "schedulers keep" in result.stdout.splitlines()[-1]

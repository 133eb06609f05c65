"""One server, disturbed in every way: what is dumped stays right, and nothing else is harmed.

Decoding requests are retracted every third step and their prompts are computed again, decode rides
in prefill batches, and chunks are small, whatever else a test does.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import resource
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
import psutil
import pytest
from helpers import make_prompts, read_samples, rows_of, write_prompts

import extractor.dispatch.connection
from extractor.core.checks import ReplyFacts
from extractor.core.failure import Failure, FailureKind
from extractor.core.request import Request
from extractor.dispatch.connection import Connection
from extractor.dispatch.scheduler import Slot
from extractor.dumps.collector import Collected
from extractor.servers.client import Client
from manifest.states import Reason, State
from plugin.client import assert_stored, extract
from plugin.conftest import EnginePlugins
from plugin.reference import Reference
from plugin.serving import Serving, read_dump, serve, wait_for
from plugin.stand_ins.faults import POINTS, SLOW
from plugin.values import assert_is, make_ids
from prompts.types import Prompt
from server_patch.dump_format import is_dump_name

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(480)]

BOUNDARIES = (2, 4, 5)
CHUNK = 8  # tokens
#: In chunks of 8: some 90 forwards, of 50 ms at least when they are slowed.
LONG = 700


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


ROOT_BYTES = 64 << 20


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The dump root: a file system of its own, where one may be mounted."""
    path = tmp_path_factory.mktemp("dumps")
    options = f"size={ROOT_BYTES},mode=700"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    is_mounted = subprocess.run(command, capture_output=True).returncode == 0
    yield path
    if is_mounted:
        subprocess.run(["umount", "--lazy", path], check=True)


@pytest.fixture(scope="module")
def server(
    faults: Path,
    engine_plugins: EnginePlugins,
    model_dir: Callable[[str], Path],
    root: Path,
) -> Iterator[Serving]:
    with ExitStack() as stack:
        umask = os.umask(0o077)  # inherited by the server
        try:
            running = stack.enter_context(
                serve(
                    model_dir("llama"),
                    root,
                    boundaries="eagle3",
                    last="both",
                    args=(
                        "--chunked-prefill-size", str(CHUNK),
                        "--max-total-tokens", "4096",
                        "--enable-mixed-chunk",
                        "--sleep-on-idle",
                    ),
                    env={
                        **engine_plugins("faults"),
                        "RIG_FAULTS": str(faults),
                        "SGLANG_HS_FILE_MODE": "660",
                        "SGLANG_TEST_RETRACT": "1",
                        # Seconds after which the engine looks whether a silent caller is there.
                        "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1",
                    },
                )
            )  # fmt: skip
        finally:
            os.umask(umask)
        yield running


@pytest.fixture(scope="module")
def reference(model_dir: Callable[[str], Path]) -> Reference:
    return Reference(model_dir("llama"))


@pytest.fixture(autouse=True)
def clean(server: Serving) -> None:
    """Each test begins with nothing dumped."""
    clear(server)


@contextmanager
def present(path: Path) -> Iterator[None]:
    """An empty file is there inside the block."""
    path.touch()
    try:
        yield
    finally:
        path.unlink()


def assert_right(server: Serving, reference: Reference, rid: str, ids: list[int]) -> None:
    """`ids`, sent as `rid`, come whole and right; its dumps are removed."""
    server.generate(rid, ids)
    assert_is(server.take_sample(rid, len(ids)), ids, BOUNDARIES, reference.states(ids))


def rows_of_rid(server: Serving, rid: str) -> int:
    return sum(dump.header.rows for _, dump in server.dumps() if dump.header.rid == rid)


def wait_for_rows(server: Serving, rid: str, count: int) -> None:
    wait_for(lambda: rows_of_rid(server, rid) >= count)


def arrives(server: Serving, rid: str, count: int) -> bool:
    """Waits for either outcome: `count` rows of `rid` came, or an error record."""

    def is_told() -> bool:
        return rows_of_rid(server, rid) == count or any(r.rid == rid for r in server.errors())

    wait_for(is_told)
    return rows_of_rid(server, rid) == count


def clear(server: Serving) -> None:
    """Remove all dumps and error records."""
    for path, _ in server.dumps():
        path.unlink()
    for path in server.directory.glob("*.error.json"):
        path.unlink()


def post(server: Serving, path: str, body: dict[str, Any]) -> http.client.HTTPConnection:
    """Send a request and do not wait for its answer."""
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection


def test_everything_has_the_mode_that_was_asked_for(server: Serving, faults: Path) -> None:
    """660 under a umask of 077, as for a client of another user in the same group."""
    with present(faults / "server_patch.staging.CpuStager.stage"):
        server.generate("xtr-mode-error", make_ids(970, 20))
    server.generate("xtr-mode", make_ids(970, 20))
    wait_for(lambda: rows_of_rid(server, "xtr-mode") == 20 and server.errors())
    kinds = ("READY.json", "STATS.json", "*.safetensors", "*.error.json")
    wait_for(lambda: all(list(server.directory.glob(kind)) for kind in kinds))
    modes = {path.name: path.stat().st_mode & 0o777 for path in server.directory.iterdir()}
    assert set(modes.values()) == {0o660}, modes
    for directory in (server.directory, server.directory.parent):
        assert directory.stat().st_mode & 0o777 == 0o770


# --- what the engine does to requests -------------------------------------------------------------


def test_rows_stay_right_while_others_are_retracted(server: Serving, reference: Reference) -> None:
    """Foreign requests and a caller with our prefix decode and are retracted again and again. A
    prompt that is computed twice is dumped twice, and the same."""
    foreign = {f"foreign-{i}": make_ids(800 + i, 9 + 4 * i) for i in range(4)}
    ours = {f"xtr-r-{i}": make_ids(600 + i, 5 + 7 * i) for i in range(10)}
    decoding = {f"xtr-d-{i}": make_ids(700 + i, 11 + 5 * i) for i in range(4)}

    def sampling(count: int) -> dict[str, Any]:
        return {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}

    # While a prefill runs, decode rides in it and nobody is retracted; ours decode for longer than
    # all prefills and all others take.
    requests: list[dict[str, Any]] = [
        *({"rid": r, "ids": ids, "sampling_params": sampling(50)} for r, ids in foreign.items()),
        *({"rid": r, "ids": ids} for r, ids in ours.items()),
        *({"rid": r, "ids": ids, "sampling_params": sampling(200)} for r, ids in decoding.items()),
    ]
    answers = server.generate_all(requests)
    retractions = {a["meta_info"]["id"]: a["meta_info"]["num_retractions"] for a in answers}
    assert any(retractions[rid] for rid in decoding), retractions
    assert not any(retractions[rid] for rid in ours)
    for rid, ids in ours.items():
        assert_is(server.take_sample(rid, len(ids)), ids, BOUNDARIES, reference.states(ids))
    for rid, ids in decoding.items():
        wait_for_rows(server, rid, len(ids))
        truth = reference.states(ids)
        covered: set[int] = set()
        for _, dump in server.dumps():
            if dump.header.rid == rid:
                rows = range(dump.header.start, dump.header.start + dump.header.rows)
                covered.update(rows)
                assert_is(dump.tensors, ids[rows.start : rows.stop], BOUNDARIES, truth.rows(rows))
        assert covered == set(range(len(ids)))  # and no row past the prompt
    assert server.errors() == []


def test_an_abort_in_mid_prefill_leaves_a_part_and_the_next_attempt_is_whole(
    server: Serving, faults: Path, reference: Reference
) -> None:
    ids = make_ids(900, LONG)
    with present(faults / SLOW), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.generate, "xtr-aborted-1", ids)
        wait_for(lambda: rows_of_rid(server, "xtr-aborted-1"))
        with closing(post(server, "/abort_request", {"rid": "xtr-aborted-1"})) as connection:
            connection.getresponse().read()
        reason = answer.result()["meta_info"]["finish_reason"]
    assert reason["type"] == "abort"
    assert_right(server, reference, "xtr-aborted-2", ids)
    assert 0 < rows_of_rid(server, "xtr-aborted-1") < LONG
    assert server.errors() == []


def test_a_caller_that_goes_away_in_mid_prefill_is_the_same(
    server: Serving, faults: Path, reference: Reference
) -> None:
    ids = make_ids(901, LONG)
    with present(faults / SLOW):
        connection = post(
            server,
            "/generate",
            {"rid": "xtr-left-1", "input_ids": ids, "extra_key": "xtr-left-1",
             "sampling_params": {"max_new_tokens": 1}},
        )  # fmt: skip
        wait_for(lambda: rows_of_rid(server, "xtr-left-1"))
        connection.close()
        # One prompt is cut into chunks at a time: this one comes after the end of that.
        server.generate("xtr-left-2", ids[:20])
    wait_for(lambda: rows_of_rid(server, "xtr-left-2") == 20)
    assert 0 < rows_of_rid(server, "xtr-left-1") < LONG
    assert_right(server, reference, "xtr-left-3", ids)
    assert server.errors() == []


@pytest.mark.parametrize("count", [0, 1, 2])
def test_any_number_of_new_tokens_gives_the_prompts_rows(
    server: Serving, reference: Reference, count: int
) -> None:
    ids = make_ids(910 + count, 29)
    rid = f"xtr-new-{count}"
    sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
    answer = server.generate(rid, ids, sampling_params=sampling)
    # The engine samples one token from every prefill, whether it is asked for or not.
    assert answer["meta_info"]["completion_tokens"] in (count, 1)
    assert_is(server.take_sample(rid, 29), ids, BOUNDARIES, reference.states(ids))
    assert list(server.dumps()) == []


def test_health_checks_and_other_peoples_rids_are_nobodys(server: Serving) -> None:
    """The engine's own probes are one-token prompts; an rid may also be a list's or not given."""
    address = urlsplit(server.url)
    for path in ("/health", "/health_generate"):
        with closing(http.client.HTTPConnection(address.netloc, timeout=60)) as connection:
            connection.request("GET", path)
            assert connection.getresponse().status == 200
    body = {"input_ids": make_ids(915, 20), "sampling_params": {"max_new_tokens": 1}}
    several = {**body, "input_ids": [make_ids(916, 9), make_ids(917, 12)]}
    for request in (body, {**body, "rid": "xtr"}, several):
        with closing(post(server, "/generate", request)) as connection:
            assert connection.getresponse().status == 200
    server.generate("xtr-last", make_ids(918, 10))
    wait_for(lambda: rows_of_rid(server, "xtr-last") == 10)
    assert {dump.header.rid for _, dump in server.dumps()} == {"xtr-last"}
    assert server.errors() == []


def test_a_reader_never_sees_a_file_that_is_not_whole(server: Serving) -> None:
    """Whatever has a final name is read at once, while 12 prompts are being written."""
    seen: dict[str, int] = {}
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            for path in server.directory.iterdir():
                if is_dump_name(path.name) and path.name not in seen:
                    dump = read_dump(path)  # raises unless the size is what the header says
                    seen[path.name] = dump.header.rows
                    assert {len(tensor) for tensor in dump.tensors.values()} == {dump.header.rows}

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            ids = {f"xtr-w-{i}": make_ids(920 + i, 200) for i in range(12)}
            server.generate_all([{"rid": rid, "ids": row} for rid, row in ids.items()])
            wait_for(lambda: sum(seen.values()) >= 12 * 200 or watching.done())
        finally:
            done.set()
        watching.result()
    assert sum(seen.values()) == 12 * 200


# --- the prefix cache and the real client ---------------------------------------------------------


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Reason]]:
    """Attempts of the client that gave no sample: attempt number and reason."""
    failed: list[tuple[int, Reason]] = []
    fetch = Connection.fetch

    async def note(self: Connection, prompt: Prompt, attempt: int, slot: Slot) -> Collected:
        outcome = await fetch(self, prompt, attempt, slot)
        if isinstance(outcome, Failure):
            failed.append((attempt, outcome.reason))
        return outcome

    monkeypatch.setattr(Connection, "fetch", note)
    return failed


def share_cache(monkeypatch: pytest.MonkeyPatch, *, attempts: int) -> None:
    """Make the first `attempts` requests for a row go out without their isolation."""
    to_json = Request.to_json

    def shared(self: Request) -> bytes:
        document = orjson.loads(to_json(self))
        is_probe = self.prompt.origin.source == "probe"
        if not is_probe and int(self.rid.rpartition("-")[2]) <= attempts:
            del document["extra_key"]
        return orjson.dumps(document)

    monkeypatch.setattr(Request, "to_json", shared)


@pytest.mark.parametrize("is_told", [True, False])
def test_a_prompt_from_the_prefix_cache_is_sent_again_and_never_stored(
    server: Serving,
    reference: Reference,
    tmp_path: Path,
    outcomes: list[tuple[int, Reason]],
    monkeypatch: pytest.MonkeyPatch,
    is_told: bool,
) -> None:
    """First the server has seen the prompts' beginnings, under no key; then the client's first
    attempts go out without one. `is_told`: the server says how many tokens came from its cache.
    Without that the missing rows alone show it."""
    prompts = make_prompts(6, seed=50 + is_told, shortest=20, longest=60, vocabulary=500)
    for number, row in enumerate(prompts):
        server.generate(f"foreign-{number}", row.ids[: 12 + number], extra_key=None)
    path = write_prompts(tmp_path / "p.jsonl", prompts)
    if not is_told:
        monkeypatch.setattr(extractor.dispatch.connection, "check_reply", lambda *_, **__: None)
    reason = Reason.CACHED if is_told else Reason.DUMP_MISSING
    share_cache(monkeypatch, attempts=1)
    options = {"dump_timeout_s": 60.0 if is_told else 2.0}
    out = tmp_path / "given-up"
    summary = extract(server, path, out, max_attempts=1, **options)
    assert summary.totals.by_state[State.FAILED] == 6
    assert {(row.state, row.reason) for row in rows_of(out)} == {(State.FAILED, reason)}
    assert read_samples(out) == {}
    outcomes.clear()
    out = tmp_path / "again"
    summary = extract(server, path, out, **options)
    assert summary.totals.by_state[State.STORED] == 6
    assert sorted(outcomes) == [(1, reason)] * 6
    assert_stored(out, prompts, BOUNDARIES, reference)
    assert list(server.dumps()) == []


def test_isolated_requests_are_never_served_from_the_cache(
    server: Serving, reference: Reference, tmp_path: Path, outcomes: list[tuple[int, Reason]]
) -> None:
    """The same prompts as the server has just computed, with and without a key."""
    prompts = make_prompts(6, seed=60, shortest=10, longest=60, vocabulary=500)
    for key in (None, "shared"):
        for row in prompts:
            server.generate("foreign", row.ids, extra_key=key)
    path = write_prompts(tmp_path / "p.jsonl", [*prompts, *prompts])
    extract(server, path, tmp_path / "out")
    assert outcomes == []
    assert_stored(tmp_path / "out", [*prompts, *prompts], BOUNDARIES, reference)


def test_a_client_that_loses_patience_stores_one_attempt_and_leaves_nothing(
    server: Serving,
    faults: Path,
    reference: Reference,
    tmp_path: Path,
    outcomes: list[tuple[int, Reason]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first attempt is given up in mid-prefill; what it wrote, and goes on to write, is not
    mixed with the second's."""
    prompts = make_prompts(1, seed=70, shortest=LONG, longest=LONG, vocabulary=500)
    path = write_prompts(tmp_path / "p.jsonl", prompts)
    generate = Client.generate
    given_up: list[str] = []

    async def impatient(self: Client, request: Request) -> ReplyFacts | Failure:
        if request.prompt.origin.source == "probe" or given_up:
            return await generate(self, request)
        with present(faults / SLOW):
            answer = asyncio.create_task(generate(self, request))
            await asyncio.to_thread(wait_for, lambda: rows_of_rid(server, request.rid))
            answer.cancel()
            given_up.append(request.rid)
        return Failure(
            reason=Reason.SERVER_ERROR,
            detail="the server did not answer in time",
            kind=FailureKind.SILENT,
        )

    monkeypatch.setattr(Client, "generate", impatient)
    summary = extract(server, path, tmp_path / "out")
    assert summary.totals.by_state[State.STORED] == 1
    assert outcomes == [(1, Reason.SERVER_ERROR)]
    assert_stored(tmp_path / "out", prompts, BOUNDARIES, reference)
    assert list(server.dumps()) == []
    assert server.errors() == []


def test_prompts_that_another_client_aborts_are_sent_again_at_no_cost(
    server: Serving,
    faults: Path,
    reference: Reference,
    tmp_path: Path,
    outcomes: list[tuple[int, Reason]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An operator or a weight update may abort all: most wait in the queue, one is in prefill."""
    prompts = make_prompts(6, seed=80, shortest=60, longest=60, vocabulary=500)
    path = write_prompts(tmp_path / "p.jsonl", prompts)
    generate = Client.generate
    sent: list[str] = []
    aborting: list[asyncio.Task[None]] = []

    def abort_all() -> None:
        wait_for(lambda: any(rows_of_rid(server, rid) for rid in sent))
        with closing(post(server, "/abort_request", {"rid": "", "abort_all": True})) as connection:
            assert connection.getresponse().status == 200
        (faults / SLOW).unlink()

    async def disturbed(self: Client, request: Request) -> ReplyFacts | Failure:
        if request.prompt.origin.source != "probe":
            sent.append(request.rid)
            if len(sent) == len(prompts):
                aborting.append(asyncio.create_task(asyncio.to_thread(abort_all)))
        return await generate(self, request)

    monkeypatch.setattr(Client, "generate", disturbed)
    (faults / SLOW).touch()
    extract(server, path, tmp_path / "out", max_attempts=1)
    assert len(outcomes) >= 2
    assert set(outcomes) == {(1, Reason.SERVER_ERROR)}
    assert_stored(tmp_path / "out", prompts, BOUNDARIES, reference)
    assert list(server.dumps()) == []


# --- what fails in or around the plugin -----------------------------------------------------------


@pytest.mark.parametrize("point", POINTS)
def test_an_exception_anywhere_leaves_the_server_serving(
    server: Serving, faults: Path, reference: Reference, point: str
) -> None:
    ids = make_ids(930, 21)
    plain = server.generate("foreign", ids)["output_ids"]
    rids = [f"xtr-{point}-{number}" for number in range(6)]  # more than the ring has slots
    with present(faults / point):
        for rid in rids:
            assert server.generate(rid, ids)["output_ids"] == plain
        if point.endswith(".RequestIds"):  # only mixed chunks need it
            wait_for(lambda: rows_of_rid(server, rids[-1]) == 21)
        elif not point.endswith(".is_prefill"):  # then nobody knows whose forward it was
            wait_for(lambda: {record.rid for record in server.errors()} == set(rids))
            assert all(f"injected at {point}" in record.reason for record in server.errors())
            assert list(server.dumps()) == []
    for rid in rids:
        assert_right(server, reference, f"{rid}-again", ids)


def writer_processes(server: Serving) -> list[psutil.Process]:
    """The plugin's living processes of this server."""
    scheduler = psutil.Process(server.readies()[0].process.pid)
    found = []
    for child in scheduler.children():
        with suppress(psutil.NoSuchProcess):  # or dead and not yet waited for
            if "server_patch" in " ".join(child.cmdline()):
                found.append(child)
    return found


@contextmanager
def file_size_limit(process: psutil.Process, size_bytes: int) -> Iterator[None]:
    """The kernel lets `process` write no longer files inside the block."""
    before = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, before)


def test_a_dump_the_kernel_refuses_becomes_an_error_record(
    server: Serving, reference: Reference
) -> None:
    (writer,) = writer_processes(server)
    ids = make_ids(940, CHUNK)
    with file_size_limit(writer, 4096):
        assert len(server.generate("xtr-big", ids)["output_ids"]) == 1
        wait_for(lambda: server.errors())
    (record,) = server.errors()
    assert (record.rid, record.start) == ("xtr-big", 0)
    assert "File too large" in record.reason
    wait_for(lambda: not list(server.directory.glob(".*")))
    clear(server)
    assert_right(server, reference, "xtr-fits", ids)


@contextmanager
def small_file_system(root: Path, size_bytes: int) -> Iterator[None]:
    """The dump root has that size inside the block; skips the test where it cannot have one."""
    if not os.path.ismount(root):
        pytest.skip("file systems cannot be mounted here")
    for size in (size_bytes, ROOT_BYTES):
        subprocess.run(["mount", "-o", f"remount,size={size}", root], check=True)
        if size == size_bytes:
            yield


def num_lost(server: Serving) -> int:
    """How often the server said that not even an error record could be written."""
    return server.log_path.read_text().count("error records could not be written")


def test_a_full_file_system_costs_what_does_not_fit(server: Serving, reference: Reference) -> None:
    ids = make_ids(945, 5 * CHUNK)
    before = num_lost(server)
    with small_file_system(server.root, 80 << 10):  # six dumps of 11 kB, and two more files
        for number in range(6):
            assert len(server.generate(f"xtr-full-{number}", ids)["output_ids"]) == 1
        wait_for(lambda: server.errors() or num_lost(server) > before)
        assert {record.reason for record in server.errors()} <= {
            "writing failed: OSError: [Errno 28] No space left on device"
        }
        assert 0 < len(list(server.dumps())) <= 6  # each of them whole, or reading it would raise
        wait_for(lambda: not list(server.directory.glob(".*")))
        # The client makes room by taking what is there.
        clear(server)
        assert_right(server, reference, "xtr-room", ids[: 3 * CHUNK])
    assert_right(server, reference, "xtr-after", ids)


def test_dumps_go_to_the_directory_that_was_made_wherever_its_path_leads(
    server: Serving, reference: Reference, tmp_path: Path
) -> None:
    ids = make_ids(950, 40)
    directory = server.directory
    aside = directory.with_name("aside")
    directory.rename(aside)
    directory.symlink_to(tmp_path)
    assert len(server.generate("xtr-aside", ids)["output_ids"]) == 1
    wait_for(lambda: list(aside.glob("*.safetensors")))
    assert list(tmp_path.iterdir()) == []
    directory.unlink()
    aside.rename(directory)
    clear(server)
    assert_right(server, reference, "xtr-back", ids)


def test_a_killed_writer_is_replaced(server: Serving, reference: Reference) -> None:
    """What comes meanwhile is refused with the reason, as long as there is no other."""
    (writer,) = writer_processes(server)
    writer.kill()
    wait_for(lambda: writer not in writer_processes(server))
    ids = make_ids(960, 20)
    for attempt in range(100):
        rid = f"xtr-killed-{attempt}"
        server.generate(rid, ids)
        if arrives(server, rid, 20):
            break
    assert_is(server.take_sample(rid, 20), ids, BOUNDARIES, reference.states(ids))
    reasons = {record.reason for record in server.errors()}
    assert reasons <= {
        "handing over failed: WriterError: no writer process is left",
        "the writer process ended with status -9",
    }
    for number in range(6):  # more than the ring has slots
        assert_right(server, reference, f"xtr-new-writer-{number}", ids)

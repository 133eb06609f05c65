"""A real server with an API key: it asks for the key, and no process shows it."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers import make_prompts, write_prompts

from acceptance.real import Real
from acceptance.tool import Tool
from extractor.servers.api_key import API_KEY_VARIABLE

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

KEY = "sk-in-no-list-of-processes-4711"


class Watch(threading.Thread):
    """Reads the command line of every process until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.is_over = threading.Event()
        self.showing: set[bytes] = set()
        self.engines: set[bytes] = set()

    def run(self) -> None:
        while not self.is_over.wait(0.02):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    command = path.read_bytes()
                except OSError:
                    continue
                if KEY.encode() in command:
                    self.showing.add(command)
                if command.startswith(b"sglang::") or b"sglang.launch_server" in command:
                    self.engines.add(command)


@contextmanager
def watching() -> Iterator[Watch]:
    watch = Watch()
    watch.start()
    try:
        yield watch
    finally:
        watch.is_over.set()
        watch.join()


def status_of(url: str, key: str | None) -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_server_of_ours_asks_for_the_key_and_no_process_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rig.env import SERVER_ARGS, environment
    from rig.models import tiny

    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    model = tiny("llama", tmp_path / "llama")
    scratch, dumps, out = tmp_path / "t", tmp_path / "dumps", tmp_path / "out"
    scratch.mkdir()
    key_file = tmp_path / "key"
    key_file.write_text(f"{KEY}\n")
    key_file.chmod(0o600)
    tool = Tool(cwd=tmp_path, environment={**environment(), "TMPDIR": str(scratch)})
    path = write_prompts(tmp_path / "p.jsonl", make_prompts(5, vocabulary=500))
    try:
        with watching() as watch:
            serving = tool.start(
                "serve", "--model", model, "--port", 0, "--dump-dir", dumps, "--log",
                tmp_path / "log", "--api-key-file", key_file, "--", *SERVER_ARGS,
                "--dtype", "float32", "--skip-tokenizer-init",
            )  # fmt: skip
            assert serving.stdout is not None
            url = serving.stdout.readline().strip()
            assert url, serving.communicate()[1]
            assert list(scratch.glob("*.yaml")) == []
            given = (None, "wrong", KEY)
            assert [status_of(f"{url}/model_info", key) for key in given] == [401, 401, 200]
            server = Real(url=url, root=dumps, process=serving)  # type: ignore[arg-type]
            refused = tool.run(path, tmp_path / "refused", server)
            assert refused.returncode == 3
            assert "name an --api-key-file" in refused.stderr
            done = tool.run(path, out, server, "--api-key-file", key_file, "-vv")
            assert done.returncode == 0, done.stderr
            assert tool("verify", out).returncode == 0
            shown = subprocess.run(["ps", "-ef"], capture_output=True, text=True, check=True)
            assert "sglang" in shown.stdout
            assert KEY not in shown.stdout
        assert watch.engines
        assert watch.showing == set()
        assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600
        assert KEY not in json.dumps([done.stdout, done.stderr, refused.stderr])
        for file in [*out.rglob("*"), *dumps.rglob("*")]:
            assert not file.is_file() or KEY.encode() not in file.read_bytes()
        serving.terminate()
        _, log = serving.communicate(timeout=60)
        assert KEY not in log
    finally:
        tool.stop_all()
    assert not os.listdir(dumps)

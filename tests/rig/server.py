"""A real SGLang server on the CPU, for as long as a ``with`` block."""

from __future__ import annotations

import contextlib
import http.client
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from extractor.servers.launcher import free_port
from extractor.system.process_tree import die_with_parent
from extractor.system.shared_memory import unused_files

from .env import RIG_PLUGINS, SERVER_ARGS, environment
from .process import stop_tree

_OURS = "SGLANG_HS_"  # prefix of our plugin's settings
_POLL_S = 0.2
_TAIL_LINES = 40


class CpuServer(NamedTuple):
    """A server that answers."""

    url: str
    process: subprocess.Popen[bytes]
    log_path: Path


class ServerDied(RuntimeError):
    """The server ended, or was not ready in time; the message holds the end of its log."""


@contextlib.contextmanager
def cpu_server(
    model_dir: Path,
    dump_dir: Path | None = None,
    extra_args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    plugin: bool = True,
    *,
    dtype: str = "float32",
    log_path: Path | None = None,
    timeout_s: float = 180.0,
    port: int | None = None,
) -> Iterator[CpuServer]:
    """Start SGLang for `model_dir`, wait until it is ready, stop its whole process tree at the end.

    dump_dir: where our plugin dumps; without it the plugin is loaded and must do nothing.
    extra_args: come last, so they override the rig's. env: is added to the environment.
    plugin: False starts a server that does not even load our plugin.
    port: of 127.0.0.1; by default a free one.
    log_path: where the server's output goes; by default to a file that lives as long as the server.
    A model folder without tokenizer is served with ``--skip-tokenizer-init`` (token ids only).
    """
    # The engine leaves its socket files in the temporary folder: give it one of its own. The path
    # stays short, because a Unix socket's may have no more than 107 characters.
    with tempfile.TemporaryDirectory(prefix="rig-", ignore_cleanup_errors=True) as scratch:
        settings = _settings(dump_dir, plugin)
        settings["TMPDIR"] = scratch
        settings.update(env or {})
        log = log_path or Path(scratch, "server.log")
        port = port or free_port()
        unused = unused_files()
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*_command(model_dir, port, dtype), *extra_args],
                env=settings,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C at the terminal is ours to pass on
                preexec_fn=die_with_parent,
            )
        try:
            _wait_ready(process, port, log, timeout_s)
            yield CpuServer(f"http://127.0.0.1:{port}", process, log)
        finally:
            stop_tree(process)
            for left in unused_files().keys() - unused:  # by a test's kill -9, too
                left.unlink(missing_ok=True)


def _settings(dump_dir: Path | None, plugin: bool) -> dict[str, str]:
    settings = {k: v for k, v in environment().items() if not k.startswith(_OURS)}
    if not plugin:
        settings["SGLANG_PLUGINS"] = RIG_PLUGINS
    elif dump_dir is not None:
        settings[f"{_OURS}DUMP_DIR"] = str(dump_dir)
    return settings


def _command(model_dir: Path, port: int, dtype: str) -> list[str]:
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model_dir)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", dtype, *SERVER_ARGS]
    if not (model_dir / "tokenizer.json").exists():
        command.append("--skip-tokenizer-init")
    return command


def _wait_ready(process: subprocess.Popen[bytes], port: int, log: Path, timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    while not _answers(port):
        if process.poll() is not None:
            raise ServerDied(f"the server ended with {process.returncode}:\n{_tail(log)}")
        if time.monotonic() > until:
            raise ServerDied(f"the server was not ready after {timeout_s:.0f} s:\n{_tail(log)}")
        time.sleep(_POLL_S)


def _answers(port: int) -> bool:
    """Ask /ready: true once the warm-up is over, and unlike /health it runs no forward."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])

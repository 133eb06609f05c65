"""The whole product once, on a CPU: start SGLang, extract, verify, stop. `make demo` runs it.

    python examples/demo.py DIR

DIR/model is the model. The data set and the server's log go to DIR, the dumps to a folder of their
own in /dev/shm, which is removed at the end. Ends with 0 only when everything came out as it must:
the prompt file has two bad rows on purpose, so `extractor run` reports exactly these and ends with
1, and `extractor verify` accounts for every row and finds nothing wrong.
"""

from __future__ import annotations

import json
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from rig.env import SERVER_ARGS, environment  # noqa: E402
from rig.process import stop_tree  # noqa: E402

EXTRACTOR = Path(sys.executable).with_name("extractor")
PROMPTS = ROOT / "examples" / "prompts.jsonl"
BAD_ROWS = 2  # a line that is no JSON, and a role that no chat has
START_TIMEOUT_S = 240.0


class DemoFailed(Exception):
    """Something came out differently from what it must."""


def main(demo: Path) -> None:
    began = time.monotonic()
    extraction = demo / "extraction"
    shutil.rmtree(extraction, ignore_errors=True)  # a left-over one would be resumed
    with tempfile.TemporaryDirectory(prefix="extractor-demo-", dir="/dev/shm") as dumps:
        with server(demo / "model", Path(dumps), demo / "server.log") as url:
            status = extractor(
                "run", PROMPTS, "--out", extraction, "--server", url, "--dump-dir", dumps
            )
            expect("exit status of `extractor run`", status, 1)
            left = list(Path(dumps).rglob("*.safetensors"))
            expect("dumps left in /dev/shm", len(left), 0)
        expect("exit status of `extractor verify`", extractor("verify", extraction), 0)
        expect("failed rows", failed_rows(extraction), BAD_ROWS)
    print(f"\ndemo: all as expected, in {time.monotonic() - began:.0f} s. Data set: {extraction}")


@contextmanager
def server(model: Path, dumps: Path, log: Path) -> Iterator[str]:
    """Start `extractor serve`, yield its URL once it is ready, stop it with its whole tree."""
    command: list[str | Path] = [EXTRACTOR, "serve", "--model", model, "--port", "0"]
    command += ["--dump-dir", dumps, "--log", log, "--", *SERVER_ARGS, "--dtype", "bfloat16"]
    show(command)
    process = subprocess.Popen(
        command,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C reaches this process, which then stops the server
    )
    try:
        yield first_line(process)
    finally:
        stop_tree(process)


def first_line(process: subprocess.Popen[bytes]) -> str:
    """Return the line that `extractor serve` prints when the server is ready: its URL."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
    if not ready:
        raise DemoFailed(f"the server was not ready after {START_TIMEOUT_S:.0f} s")
    line = process.stdout.readline().decode().strip()
    if not line:
        raise DemoFailed(f"the server ended with {process.wait()}")
    return line


def extractor(*arguments: str | Path) -> int:
    """Run the command as a user would and return its exit status."""
    command = [EXTRACTOR, *arguments]
    show(command)
    return subprocess.run(command, env=environment(), stdin=subprocess.DEVNULL).returncode


def failed_rows(extraction: Path) -> int:
    report = subprocess.run(
        [EXTRACTOR, "verify", extraction, "--fast", "--json"], stdout=subprocess.PIPE, check=True
    )
    by_reason: dict[str, int] = json.loads(report.stdout)["failed"]
    return sum(by_reason.values())


def expect(what: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise DemoFailed(f"{what}: {found}, but it must be {wanted}")


def show(command: Sequence[str | Path]) -> None:
    words = [Path(command[0]).name, *map(str, command[1:])]
    print(f"\n$ {shlex.join(words)}", flush=True)


def stop_asked(signum: int, frame: object) -> None:
    sys.exit(128 + signum)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} DIR")
    # A plain SIGTERM would skip every clean-up; as an exception it does not.
    signal.signal(signal.SIGTERM, stop_asked)
    try:
        main(Path(sys.argv[1]))
    except DemoFailed as error:
        sys.exit(f"demo: FAILED: {error}")
    except KeyboardInterrupt:
        sys.exit(130)

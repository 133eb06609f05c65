"""One worker process, seen from the client. What it runs: `prompts.render_worker`.

Not by multiprocessing, whose processes first import the program that started them: a script without
`if __name__ == "__main__"` would run twice, and one from standard input could not start any. Nor by
a pool of a library, where workers share one pipe, which a worker that is killed in the middle of a
message leaves unusable for all.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import BinaryIO, Final

from prompts.worker_messages import CodeLimits, Message, dumps, loads

#: Loads our `prompts` by its place, as another package of that name may be first on the path.
_BOOT: Final = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
requests, answers, ours, *sys.path = sys.argv[1:]
spec = spec_from_file_location("prompts", ours)
module = sys.modules["prompts"] = module_from_spec(spec)
spec.loader.exec_module(module)
from prompts.render_worker import main
main(int(requests), int(answers))
"""
_OURS: Final = Path(__file__).with_name("__init__.py")
#: How long a process that closed its pipes has to exit by itself.
_EXIT_S: Final = 5.0
#: How much of the end of a dead process's output is looked at, and how much of its last line shown.
_TAIL_BYTES: Final = 4096
_MAX_CHARS: Final = 160
#: Written by the tokenizers library before it aborts.
_NO_MEMORY: Final = "memory allocation of"


class WorkerDied(Exception):
    """The worker process ended. The message says why, as a row's detail does."""


class WorkerProcess:
    """A running worker process."""

    def __init__(self, limits: CodeLimits) -> None:
        """Raises OSError where no process can be started."""
        self._limits = limits
        self._limit_s = limits.load_s  # of what it does now
        #: Raised by the code in it, as the process said before it ended.
        self._complaint = ""
        their_requests, self._requests = Pipe(duplex=False)
        #: Ready to be read when there is an answer, or the process ended.
        self.answers, their_answers = Pipe(duplex=False)
        # Whatever the code in it prints is not for the terminal.
        self._output: BinaryIO = tempfile.TemporaryFile()
        with their_requests, their_answers:
            pipes = (their_requests.fileno(), their_answers.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, *map(str, pipes), str(_OURS), *_path()],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=pipes,
                process_group=0,  # Ctrl-C is not for it
            )

    def send(self, message: Message) -> None:
        """Send a request; that the process is dead shows when the answer is received."""
        with suppress(OSError):
            self._requests.send_bytes(dumps(message))

    def receive(self) -> Message:
        """Wait for the next answer. Raises WorkerDied."""
        try:
            message = loads(self.answers.recv_bytes())
        except (EOFError, OSError) as error:
            raise WorkerDied(self._cause_of_death()) from error
        if message[0] == "raised":
            self._complaint = message[1]
            raise WorkerDied(self._cause_of_death())
        self._limit_s = self._limits.row_s
        return message

    def kill(self) -> None:
        """End the process: it holds nothing that could be lost. Safe to call from any thread."""
        self._process.kill()
        self._process.wait()
        self._output.close()

    def _cause_of_death(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        last = self._last_line()
        self.kill()
        code = self._process.returncode
        if self._complaint:
            return f"the chat template or the tokenizer {self._complaint}"
        if code == -signal.SIGALRM:
            return f"the chat template or the tokenizer took more than {self._limit_s:g} s"
        if _NO_MEMORY in last:
            memory = f"{self._limits.memory_bytes / 2**30:g} GiB of memory"
            return f"the chat template or the tokenizer needed more than {memory}"
        if code == -signal.SIGKILL:
            return "its worker process was killed (SIGKILL): is memory short?"
        how = f"of {_name_of(-code)}" if code < 0 else f"with exit status {code}"
        return f"its worker process died {how}" + (f" ({last})" if last else "")

    def _last_line(self) -> str:
        try:
            self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = self._output.read().decode(errors="replace").strip().splitlines()
        except ValueError:  # closed by `kill`, in another thread
            return ""
        line = lines[-1] if lines else ""
        return "".join(sign if sign.isprintable() else "?" for sign in line)[:_MAX_CHARS]


def _path() -> list[str]:
    return [entry or os.getcwd() for entry in sys.path]


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

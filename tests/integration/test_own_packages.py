"""Our packages next to a user's packages of the same names, earlier on the path."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest
from helpers import Notes, make_prompts, options_for, write_prompts
from templates import QWEN3, tokenizer_for

from extractor.core.own_packages import NAMES, ROOT
from extractor.pipeline.run import run
from extractor.testing.fake_server import FakeServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder with a user's packages of our names; each has a submodule of a name that we use."""
    folder = tmp_path / "theirs"
    for name, submodule in zip(NAMES, ("store", "types", "dump_format"), strict=True):
        package = folder / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("IS_THEIRS = True\n")
        (package / f"{submodule}.py").write_text("IS_THEIRS = True\n")
    return folder


@pytest.fixture
async def data_set(tmp_path: Path, dump_root: Path) -> Path:
    out = tmp_path / "out"
    prompts = write_prompts(tmp_path / "p.jsonl", make_prompts(5))
    async with FakeServer(dump_root).running() as server:
        await run(options_for(server, prompts, out), Notes())
    return out


def run_in(
    theirs: Path, *arguments: object, stdin: TextIO | None = None
) -> subprocess.CompletedProcess[str]:
    """Python with the user's folder as the working directory and first on the path."""
    path = os.pathsep.join([str(theirs), ROOT])
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        cwd=theirs,
        stdin=stdin,
        capture_output=True,
        text=True,
    )


READ = """
import sys
from pathlib import Path
{before}
import extractor

out = Path(sys.argv[1])
found = extractor.audit(out)
assert found.is_clean and found.samples_checked == 5, found.to_text()
try:
    extractor.audit(out / "nothing")
except extractor.ManifestError:
    pass
import manifest, prompts.types, server_patch
assert manifest.IS_THEIRS and prompts.types.IS_THEIRS and server_patch.IS_THEIRS
assert extractor.read_status(out).begun.num_rows == 5  # more of ours, after theirs
assert extractor.read_data_set(out).identity.model.path == "fake/model"
assert issubclass(extractor.RunOptions, object) and extractor.FakeServer.__name__
import manifest.store, server_patch.dump_format
assert sys.modules["prompts"] is prompts and not hasattr(prompts, "render")
assert manifest.store.IS_THEIRS and server_patch.dump_format.IS_THEIRS
"""


@pytest.mark.parametrize(
    "before",
    ["", "import manifest, prompts, server_patch", "import prompts.types, manifest.store"],
    ids=["not-imported", "imported", "imported-with-submodules"],
)
def test_a_data_set_is_read_next_to_a_users_packages_of_our_names(
    theirs: Path, data_set: Path, before: str
) -> None:
    done = run_in(theirs, "-c", READ.format(before=before), data_set)
    assert done.returncode == 0, done.stderr


def test_without_such_packages_ours_are_imported_as_any_library(data_set: Path) -> None:
    script = (
        "import sys, extractor\n"
        "from pathlib import Path\n"
        "assert extractor.audit(Path(sys.argv[1])).is_clean\n"
        "import manifest.store\n"
        "assert sys.modules['manifest.store'].Store is extractor.audit.__globals__['Store']\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(data_set)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_command_uses_its_own_packages(theirs: Path, data_set: Path) -> None:
    done = run_in(theirs, "-m", "extractor", "verify", data_set)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_processes_that_a_command_starts_find_its_packages(theirs: Path) -> None:
    """As the plugin in a SGLang server; the working directory is first on the path of `-c`, too."""
    child = "import server_patch; assert not hasattr(server_patch, 'IS_THEIRS')"
    script = (
        "import subprocess, sys\n"
        "import extractor.__main__\n"
        f"sys.exit(subprocess.run([sys.executable, '-c', {child!r}]).returncode)"
    )
    assert run_in(theirs, "-c", script).returncode == 0
    assert run_in(theirs, "-c", child).returncode == 1  # without the command


def test_the_commands_worker_processes_use_their_own_packages(
    theirs: Path, tmp_path: Path, dump_root: Path
) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer_for(QWEN3).save_pretrained(tokenizer)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"messages": [{"role": "user", "content": "a"}]}\n' * 3)
    with fake_server(theirs, dump_root) as url:
        done = run_in(
            theirs, "-m", "extractor", "run", prompts, "--out", tmp_path / "out", "--server", url,
            "--dump-dir", dump_root, "--tokenizer", tokenizer, "--tokenizer-workers", 1,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr


LIBRARY = """
import asyncio, sys
from pathlib import Path
import prompts.types
import extractor
from extractor import Input, Output, RunOptions, Servers

url, dump_root, file, tokenizer, out = sys.argv[1:]
options = RunOptions(
    input=Input(paths=(Path(file),), tokenizer=tokenizer),
    output=Output(directory=Path(out)),
    servers=Servers(urls=(url,), dump_root=Path(dump_root)),
)
summary = asyncio.run(extractor.run(options))
assert [*summary.totals.by_state.values()] == [3], summary.totals
assert prompts.types.IS_THEIRS
"""


@pytest.mark.parametrize("how", ["script", "standard-input"])
def test_a_librarys_worker_processes_use_their_own_packages(
    theirs: Path, tmp_path: Path, dump_root: Path, how: str
) -> None:
    """Nor do they run the program again that started them: it has no `if __name__ == ...`."""
    tokenizer = tmp_path / "tokenizer"
    tokenizer_for(QWEN3).save_pretrained(tokenizer)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"messages": [{"role": "user", "content": "a"}]}\n' * 3)
    program = tmp_path / "program.py"
    program.write_text(LIBRARY)
    with fake_server(theirs, dump_root) as url, program.open() as source:
        done = run_in(
            theirs, program if how == "script" else "-", url, dump_root, prompts, tokenizer,
            tmp_path / "out", stdin=source,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr


@contextmanager
def fake_server(theirs: Path, dump_root: Path) -> Iterator[str]:
    """`python -m extractor.testing`, next to the user's packages as well."""
    path = os.pathsep.join([str(theirs), ROOT])
    with subprocess.Popen(
        [sys.executable, "-m", "extractor.testing", "--dump-root", str(dump_root)],
        env={**os.environ, "PYTHONPATH": path},
        cwd=theirs,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()

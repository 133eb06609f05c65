"""`import extractor`: its public names, their types, and its own packages beside a user's."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import extractor
from extractor.core.own_packages import NAMES, ROOT

ROOT_PATH = Path(ROOT)
#: Public names by kind. A change here is a change for those who use them.
FUNCTIONS = {"audit", "exit_code", "read_data_set", "read_status"}
COROUTINES = {"run"}
ERRORS = {
    "BadAddress", "BadDumpDir", "ConfigMismatch", "CorruptData", "DumpFormatError",
    "ExtractorError", "InputError", "Interrupted", "ManifestError", "MissingExtra", "OutputBusy",
    "PluginError", "RowRefused", "ServerError", "ServerGone", "ServerLost", "ServerUnreachable",
    "SpaceError", "TokenizerError", "UsageError",
}  # fmt: skip
CLASSES = {
    "Audit", "DataSet", "FakeModel", "FakeServer", "Fault", "Finding", "FindingKind", "Identity",
    "Input", "Load", "Output", "Patience", "Policy", "ReadingOptions", "Reporter", "RunOptions",
    "RunSummary", "Servers", "Status",
}  # fmt: skip


def test_the_public_names_and_their_kinds() -> None:
    kinds: dict[str, set[str]] = {}
    for name in set(extractor.__all__) - {"__version__"}:
        value = getattr(extractor, name)
        assert value.__name__ == name
        if inspect.isclass(value):
            kind = "error" if issubclass(value, Exception) else "class"
        else:
            kind = "coroutine" if inspect.iscoroutinefunction(value) else "function"
        kinds.setdefault(kind, set()).add(name)
    assert kinds == {
        "function": FUNCTIONS, "coroutine": COROUTINES, "error": ERRORS, "class": CLASSES,
    }  # fmt: skip
    assert extractor.__all__ == sorted(extractor.__all__)
    assert set(extractor.__all__) <= set(dir(extractor))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = extractor.nonsense  # type: ignore[attr-defined]


def test_type_checkers_see_the_same_names_from_the_same_modules() -> None:
    tree = ast.parse(Path(extractor.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    checked = {
        node.module: {alias.name for alias in node.names}
        for node in block.body
        if isinstance(node, ast.ImportFrom)
    }
    assert checked == {module: set(names.split()) for module, names in extractor._HOMES.items()}


def test_importing_it_imports_nothing_else_of_ours() -> None:
    script = (
        "import sys, extractor\n"
        "print([name for name in sys.modules if name.startswith('extractor.')"
        f" or name in {NAMES!r} or name == 'numpy'])"
    )
    assert run_python(script).strip() == "['extractor.core', 'extractor.core.version']"


def test_modules_that_read_a_data_set_import_nothing_of_ours_inside_functions() -> None:
    """They are used while the names of our packages may be the user's."""
    inside = [
        f"{path.relative_to(ROOT_PATH)}:{node.lineno}"
        for package in ("extractor", "manifest", "prompts")
        for path in (ROOT_PATH / package).rglob("*.py")
        if path.name != "__main__.py"
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
        and any(name.partition(".")[0] in NAMES for name in names_in(node))
    ]
    assert inside == []


def names_in(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [alias.name for alias in node.names]


def run_python(script: str, *arguments: object, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


USER_SCRIPT = '''
"""A user's program."""

import asyncio
from pathlib import Path

import extractor


def clean(out: Path) -> bool:
    found: extractor.Audit = extractor.audit(out, fast=True)
    kinds: list[extractor.FindingKind] = [finding.kind for finding in found.findings.all]
    return found.is_clean and not kinds


async def extract(prompts: Path, out: Path) -> extractor.RunSummary:
    options = extractor.RunOptions(
        input=extractor.Input(paths=(prompts,), policy=extractor.Policy(max_tokens=2048)),
        output=extractor.Output(directory=out),
        servers=extractor.Servers(urls=("http://127.0.0.1:30000",)),
        load=extractor.Load(num_movers=2),
        patience=extractor.Patience(max_attempts=2),
    )
    try:
        return await extractor.run(options)
    except extractor.ExtractorError as error:
        status: int | None = extractor.exit_code(error)
        raise SystemExit(status) from error


def model(out: Path) -> str:
    data_set: extractor.DataSet = extractor.read_data_set(out)
    urls: set[str] = {start.url for start in data_set.server_starts}
    assert urls
    return data_set.identity.model.path


if __name__ == "__main__":
    asyncio.run(extract(Path("p.jsonl"), Path("out")))
'''


@pytest.mark.slow
def test_a_users_script_type_checks_strictly_and_a_wrong_one_does_not(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    right = tmp_path / "right.py"
    right.write_text(USER_SCRIPT)
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import extractor\n\nnumber: int = extractor.audit\nextractor.nonsense\n")
    checked = subprocess.run(
        [
            sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent",
            f"--config-file={ROOT_PATH / 'pyproject.toml'}", f"--cache-dir={tmp_path / 'cache'}",
            str(right), str(wrong),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT_PATH,
    )  # fmt: skip
    lines = checked.stdout.splitlines()
    assert [line.partition(": ")[0].rpartition("/")[2] for line in lines[:-1]] == [
        "wrong.py:3", "wrong.py:4",
    ], checked.stdout + checked.stderr  # fmt: skip

"""The structure of the code: unique names, small classes, few levels, constants left alone.

`KNOWN` lists what still breaks a rule. Remove an entry together with its cause; add none.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("extractor", "manifest", "prompts", "server_patch")
MAX_ENTRIES = 13  # of extractor/, without __init__, __main__ and py.typed
MAX_LEVELS = 8
MAX_ATTRIBUTES = 10
MAX_ARGUMENTS = 8
_CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*")
_DOTTED_CONSTANT = re.compile(rf"({'|'.join(PACKAGES)})(\.\w+)*\.{_CONSTANT.pattern}")


def trees(*folders: str) -> Iterator[tuple[Path, ast.Module]]:
    """Path, relative to the repository, and syntax tree of each module in `folders`."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_bytes())


@cache
def classes() -> list[ast.ClassDef]:
    nodes = chain.from_iterable(ast.walk(tree) for _, tree in trees(*PACKAGES))
    return [node for node in nodes if isinstance(node, ast.ClassDef)]


def repeated(names: Iterable[str]) -> set[str]:
    return {name for name, times in Counter(names).items() if times > 1}


def modules_of_the_same_name() -> set[str]:
    """Packages count as modules."""
    paths = [path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py")]
    names = [path.parent.name if path.stem == "__init__" else path.stem for path in paths]
    return repeated(name for name in names if name != "__main__")


def classes_of_the_same_name() -> set[str]:
    return repeated(node.name for node in classes())


def attributes(node: ast.ClassDef) -> set[str]:
    """Fields, slots, and what methods set on `self`; inherited ones belong to the base class."""
    found = set()
    for statement in node.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(name), annotation=annotation):
                if "ClassVar" not in ast.unparse(annotation):
                    found.add(name)
            case ast.Assign(targets=[ast.Name("__slots__")], value=value):
                found |= {str(n.value) for n in ast.walk(value) if isinstance(n, ast.Constant)}
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                found |= {
                    inner.attr
                    for inner in ast.walk(statement)
                    if isinstance(inner, ast.Attribute)
                    and isinstance(inner.ctx, ast.Store)
                    and isinstance(inner.value, ast.Name)
                    and inner.value.id == "self"
                }
    return found


def classes_with_many_attributes() -> set[str]:
    return {node.name for node in classes() if len(attributes(node)) > MAX_ATTRIBUTES}


def constructors_with_many_arguments() -> set[str]:
    """Written ones: a dataclass takes its fields, which are limited as attributes."""
    found = set()
    for node in classes():
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                arguments = method.args
                named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
                if len(named) - 1 > MAX_ARGUMENTS:
                    found.add(node.name)
    return found


def entries_of_extractor() -> set[str]:
    aside = {"__init__.py", "__main__.py", "py.typed", "__pycache__"}
    found = {path.name for path in (ROOT / "extractor").iterdir()} - aside
    return {"more than the limit"} if len(found) > MAX_ENTRIES else set()


def levels_of_the_import_contract() -> set[str]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layered = [contract for contract in settings["contracts"] if contract["type"] == "layers"]
    assert layered
    return {c["name"] for c in layered if len(c["layers"]) > MAX_LEVELS}


def constants_patched(tree: ast.Module) -> Iterator[str]:
    """Constants of modules that a test replaces."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(attr="setattr") | ast.Name("setattr" | "_put"),
                args=[_, ast.Constant(str(name)), *_],
            ) if _CONSTANT.fullmatch(name):
                yield name
            case ast.Constant(str(name)) if _DOTTED_CONSTANT.fullmatch(name):
                yield name.rpartition(".")[2]
            case ast.Attribute(attr=name, ctx=ast.Store()) if _CONSTANT.fullmatch(name):
                yield name


def patches_of_constants() -> set[str]:
    return {f"{path}: {name}" for path, tree in trees("tests") for name in constants_patched(tree)}


#: What works under the dump root, where every operation is one of an open `Directory`.
UNDER_THE_DUMP_ROOT = (
    "extractor/dumps", "extractor/servers/cleanup.py", "extractor/system/inotify.py",
    "extractor/testing/fake_plugin.py", "server_patch/dump_dir.py", "server_patch/dump_format.py",
    "server_patch/stats.py", "server_patch/trust.py", "server_patch/writer_pool.py",
    "server_patch/writer_process.py", "server_patch/writer_supervisor.py",
    "server_patch/writing.py",
)  # fmt: skip
_BY_PATH = {
    "builtins": {"open"},
    "os": {"chmod", "listdir", "link", "mkdir", "makedirs", "open", "remove", "rename", "replace",
           "rmdir", "scandir", "symlink", "truncate", "unlink", "walk"},
    "shutil": {"copy", "copyfile", "move", "rmtree"},
}  # fmt: skip
_PATH_METHODS = {
    "glob", "rglob", "iterdir", "mkdir", "read_bytes", "read_text", "rmdir", "touch", "write_bytes",
    "write_text", "hardlink_to", "symlink_to",
}  # fmt: skip


def operations_by_path(tree: ast.Module) -> Iterator[str]:
    """Calls that open, make, list or remove what has a path."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(name)) if name in _BY_PATH["builtins"]:
                yield name
            case ast.Call(func=ast.Attribute(ast.Name(module), name)) if name in _BY_PATH.get(
                module, set()
            ):
                yield f"{module}.{name}"
            case ast.Call(func=ast.Attribute(attr=name)) if name in _PATH_METHODS:
                yield name


def files_by_path_under_the_dump_root() -> set[str]:
    return {
        f"{path}: {name}"
        for path, tree in trees(*PACKAGES)
        if str(path).startswith(UNDER_THE_DUMP_ROOT)
        for name in operations_by_path(tree)
    }


RULES: dict[str, Callable[[], set[str]]] = {
    rule.__name__: rule
    for rule in (
        modules_of_the_same_name,
        classes_of_the_same_name,
        classes_with_many_attributes,
        constructors_with_many_arguments,
        entries_of_extractor,
        levels_of_the_import_contract,
        patches_of_constants,
        files_by_path_under_the_dump_root,
    )
}
KNOWN: dict[str, set[str]] = {
    "patches_of_constants": {
        "tests/unit/test_prompts_bounds.py: BATCH_BYTES",
        "tests/unit/test_prompts_bounds.py: MAX_EXPANDED_BYTES",
        "tests/unit/test_prompts_bounds.py: MAX_ROW_BYTES",
        "tests/unit/test_prompts_bounds.py: MAX_TURNS_RENDERED",
        "tests/unit/test_prompts_containers.py: MAX_ROW_BYTES",
        "tests/unit/test_prompts_inputs.py: BLOCK_BYTES",
        "tests/unit/test_prompts_inputs.py: CHUNK_BYTES",
        "tests/unit/test_server_patch_fingerprint.py: LANES",
        "tests/unit/test_server_patch_fingerprint.py: _CHUNK_BYTES",
        "tests/unit/test_server_patch_fingerprint.py: _CPU_STEP",
        "tests/unit/test_server_patch_weights.py: _PATIENCE_S",
    },
}


@pytest.mark.parametrize("rule", RULES)
def test_the_rule_is_kept(rule: str) -> None:
    found, known = RULES[rule](), KNOWN.get(rule, set())
    assert sorted(found - known) == [], "new"
    assert sorted(known - found) == [], "kept by now: remove these from KNOWN"


def test_an_offender_is_found() -> None:
    source = """
class Large:
    one: int
    shared: ClassVar[int] = 0
    __slots__ = ("two", "three")
    def method(self):
        self.four, other.none = 4, 5
"""
    (large,) = ast.parse(source).body
    assert isinstance(large, ast.ClassDef)
    assert attributes(large) == {"one", "two", "three", "four"}
    opening = "os.unlink(p); open(p); Path(p).glob('*'); directory.unlink('x'); directory.open(p)"
    assert {*operations_by_path(ast.parse(opening))} == {"os.unlink", "open", "glob"}
    patches = """
monkeypatch.setattr(module, "PAUSE_S", 0)
monkeypatch.setattr("extractor.one.MAX_ROWS", 0)
monkeypatch.setattr(module, "Class", 0)
constants = {"manifest.two._LEAST": 0}
module.LIMIT = 0
"""
    assert [*constants_patched(ast.parse(patches))] == ["PAUSE_S", "LIMIT", "MAX_ROWS", "_LEAST"]

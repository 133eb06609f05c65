"""Nobody goes round the borders: files of others are touched, and their JSON is parsed, in few places.

The borders are `server_patch/directory.py` (by descriptor, no links, regular files, bounded reads),
`server_patch/trust.py` (whose directory it is) and `server_patch/fields.py` (typed values, checked
once). `ALLOWED` has every other call, each with the reason why it is safe. Add none without one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

from unit.test_house import PACKAGES, trees

_OS = (
    "chmod", "chown", "link", "makedirs", "mkdir", "mkfifo", "open", "remove", "removedirs",
    "rename", "renames", "replace", "rmdir", "symlink", "truncate", "unlink",
)  # fmt: skip
_SHUTIL = (
    "chown", "copy", "copy2", "copyfile", "copymode", "copystat", "copytree", "move", "rmtree",
    "unpack_archive",
)  # fmt: skip
FUNCTIONS = {
    "open", "io.open", "tempfile.mkstemp", "tempfile.mktemp",
    "json.load", "json.loads", "orjson.loads", "pickle.load", "pickle.loads",
    *(f"os.{name}" for name in _OS),
    *(f"shutil.{name}" for name in _SHUTIL),
}  # fmt: skip
#: Methods of `pathlib.Path`.
METHODS = {
    "chmod", "hardlink_to", "mkdir", "read_bytes", "read_text", "rmdir", "symlink_to", "touch",
    "write_bytes", "write_text",
}  # fmt: skip


def calls_around(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each call that opens, changes or parses something without a border."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := _name(node)) is not None:
            yield node.lineno, name


def _name(call: ast.Call) -> str | None:
    function = ast.unparse(call.func)
    if function in FUNCTIONS:
        return function
    if not isinstance(call.func, ast.Attribute):
        return None
    method, num_arguments = call.func.attr, len(call.args)
    match method:
        case _ if method in METHODS:
            return f".{method}"
        case "unlink" if not num_arguments:  # a Directory's takes a name
            return ".unlink"
        case "rename" | "replace" if num_arguments == 1 and not call.keywords:
            return f".{method}"  # a Directory's, a string's and a dataclass's take other arguments
        case "open" if _opens_path(call):
            return ".open"
    return None


def _opens_path(call: ast.Call) -> bool:
    """Whether the arguments are those of `Path.open`: none, or a mode."""
    names = {keyword.arg for keyword in call.keywords}
    match call.args:
        case []:
            return names <= {"mode", "buffering", "encoding", "errors", "newline"}
        case [ast.Constant(str(mode)), *_]:
            return set(mode) <= set("rwxabt+")
    return False


ALLOWED: dict[str, dict[str, str]] = {}


@cache
def found() -> set[tuple[str, str]]:
    return {
        (str(path), name) for path, tree in trees(*PACKAGES) for _, name in calls_around(tree)
    }


def test_every_call_that_goes_round_a_border_has_its_reason() -> None:
    allowed = {(path, name) for path, calls in ALLOWED.items() for name in calls}
    assert sorted(found() - allowed) == [], "use the borders, or say why this is safe"
    assert sorted(allowed - found()) == [], "gone by now: remove these from ALLOWED"
    assert all(reason for calls in ALLOWED.values() for reason in calls.values())


def test_a_call_is_told_from_one_like_it() -> None:
    source = """
os.open(path, 0)
open(path)
path.open("rb")
path.open()
path.unlink(missing_ok=True)
path.rename(other)
shutil.rmtree(path)
json.loads(data)
folder.mkdir()
"""
    names = [name for _, name in calls_around(ast.parse(source))]
    assert names == [
        "os.open", "open", ".open", ".open", ".unlink", ".rename", "shutil.rmtree", "json.loads",
        ".mkdir",
    ]  # fmt: skip
    sound = """
directory.unlink(name)
directory.rename(name, new_name)
Directory.open(path)
store.open(shards)
text.replace("a", "b")
moment.replace(tzinfo=None)
replace(record, name=name)
"""
    assert list(calls_around(ast.parse(sound))) == []

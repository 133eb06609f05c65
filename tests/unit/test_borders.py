"""Nobody goes round the borders: few modules touch files of others or parse their JSON.

The borders are `server_patch/directory.py` (by descriptor, no links, regular files, bounded reads),
`server_patch/trust.py` (whose directory it is) and `server_patch/fields.py` (typed values, checked
once). `ALLOWED` has every other call, each with the reason why it is safe. Add none without one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

from test_house import PACKAGES, trees

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


#: Module -> calls, and why they are safe.
ALLOWED: dict[str, dict[str, str]] = {
    "extractor/cli/main.py": {"os.open": "/dev/null"},
    "extractor/cli/prompt_options.py": {
        "orjson.loads": "what the user typed",
    },
    "extractor/dispatch/provenance.py": {"open": "a descriptor of a regular file"},
    "extractor/pipeline/dry_run.py": {
        "orjson.loads": "config.json of the model that the user names; each value is checked",
        ".read_bytes": "the same file",
    },
    "extractor/servers/launcher.py": {
        "tempfile.mkstemp": "a log or a key: new, exclusive, of this user",
        "open": "the descriptor of such a file",
        ".unlink": "such a file again",
    },
    "extractor/servers/shm_budget.py": {".read_text": "/proc and /sys"},
    "extractor/shards/format.py": {"json.loads": "of a bounded header; its caller checks entries"},
    "extractor/shards/mover.py": {".unlink": "a RankFile, which removes by descriptor"},
    "extractor/shards/writer.py": {"open": "a descriptor of a regular file"},
    "extractor/system/files.py": {".read_text": "/proc"},
    "extractor/system/process_id.py": {".read_text": "/proc"},
    "extractor/system/process_tree.py": {
        "open": "the log that this process made",
        "os.open": "the same",
    },
    "extractor/system/shared_memory.py": {
        ".read_text": "/proc",
    },
    "extractor/testing/fake_server.py": {"orjson.loads": "for tests"},
    "extractor/dumps/collector.py": {".unlink": "a RankFile, which removes by descriptor"},
    "extractor/verify/audit.py": {"orjson.loads": "bounded; compared, never used"},
    "manifest/bulk_write.py": {"orjson.loads": "what SQLite made of checked rows"},
    "manifest/database.py": {"os.open": "/dev/null"},
    "manifest/decoding.py": {"orjson.loads": "the border of the manifest: each value is checked"},
    "prompts/paths.py": {
        "open": "standard input is kept here",
        ".unlink": "what standard input was kept in",
    },
    "prompts/reading_options.py": {"orjson.loads": "what this process encoded"},
    "prompts/regular_file.py": {
        "open": "checks on the descriptor that it is a regular file",
        "os.open": "the same, without waiting at a pipe",
    },
    "prompts/render_worker.py": {"open": "/proc"},
    "prompts/token_bound.py": {"orjson.loads": "the border of rows: bounded before and after"},
    "prompts/tokenizer.py": {"orjson.loads": "what the tokenizer library wrote"},
    "server_patch/directory.py": {
        name: "the border itself"
        for name in ("os.mkdir", "os.open", "os.rename", "os.rmdir", "os.unlink", "shutil.rmtree")
    },
    "server_patch/dump_format.py": {"json.loads": "the border of dumps"},
    "server_patch/fields.py": {"json.loads": "the border itself"},
    "server_patch/ready.py": {".read_text": "/proc"},
    "server_patch/sglang_api.py": {
        "json.loads": "config.json of the model that this server runs",
        ".read_bytes": "the same file",
    },
    "server_patch/weights.py": {"json.loads": "what another rank of this server wrote"},
    "server_patch/writer_protocol.py": {"json.loads": "what this server's own process wrote"},
}  # fmt: skip


@cache
def found() -> set[tuple[str, str]]:
    return {(str(path), name) for path, tree in trees(*PACKAGES) for _, name in calls_around(tree)}


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

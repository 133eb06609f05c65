"""The source of SGLang releases, read without importing any of it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from packaging.version import Version

from server_patch.sglang_compat import Symbol

_FIELDS = "sglang/srt/arg_groups/fields/"  # where newer releases keep the fields of ServerArgs
_DOWNLOAD_S = 300.0


class IndexUnreachable(RuntimeError):
    """No wheel to look at; the message is pip's last word."""


def download(release: str, folder: Path) -> Path:
    """The wheel of `release`, downloaded to `folder` if need be. Raises IndexUnreachable."""

    def here() -> Path | None:
        return next(iter(folder.glob(f"sglang-{release}-*.whl")), None)

    if (wheel := here()) is not None:
        return wheel
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), f"sglang=={release}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_S)
    wheel = here()
    if done.returncode != 0 or wheel is None:
        lines = done.stderr.strip().splitlines() or [f"pip ended with {done.returncode}"]
        raise IndexUnreachable(f"sglang {release} cannot be downloaded: {lines[-1]}")
    return wheel


def newer_releases(than: str) -> list[str]:
    """Releases in the package index that are newer than `than`. Raises IndexUnreachable."""
    command = [sys.executable, "-m", "pip", "index", "versions", "sglang"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_S)
    for line in done.stdout.splitlines():
        if line.startswith("Available versions:"):
            versions = [Version(text) for text in line.partition(":")[2].split(",")]
            return [str(version) for version in sorted(versions) if version > Version(than)]
    lines = done.stderr.strip().splitlines() or [f"pip ended with {done.returncode}"]
    raise IndexUnreachable(f"the releases of sglang cannot be listed: {lines[-1]}")


@dataclass(frozen=True)
class Member:
    """One attribute of a class, or one name of a module."""

    node: ast.AST
    module: str  # where it is defined, which is not always where it was asked for


class Source:
    """The modules of one release: of a wheel, or of an installed package."""

    def __init__(self, release: str, path: Path) -> None:
        """path: a wheel, or the folder that the package `sglang` lies in."""
        self.release = release
        self._path = path
        self._modules: dict[str, ast.Module | None] = {}

    @cached_property
    def _wheel(self) -> zipfile.ZipFile | None:
        return zipfile.ZipFile(self._path) if self._path.is_file() else None

    @cached_property
    def files(self) -> list[str]:
        """Every Python file, as in "sglang/srt/server_args.py"."""
        if self._wheel is not None:
            return [name for name in self._wheel.namelist() if name.endswith(".py")]
        found = (self._path / "sglang").rglob("*.py")
        return [path.relative_to(self._path).as_posix() for path in found]

    def text(self, file: str) -> str:
        data = self._wheel.read(file) if self._wheel else (self._path / file).read_bytes()
        return data.decode("utf-8-sig")

    def missing(self, target: Symbol) -> str | None:
        """What is wrong with `target` in this release, naming it; None when nothing is."""
        release = Version(self.release)
        if release < Version(target.since):
            return None
        if target.until is not None and release >= Version(target.until):
            return None
        places = " or ".join(target.places)
        found = [member for place in target.places if (member := self.find(place)) is not None]
        if not found:
            return f"SGLang {self.release} has no {places} ({target.why})"
        return next((wrong for member in found if (wrong := _mismatch(member.node, target))), None)

    def find(self, place: str) -> Member | None:
        """What is at "module", "module:name" or "module:Class.attribute"."""
        module, _, path = place.partition(":")
        owner, _, attribute = path.partition(".")
        if not owner:
            tree = self._module(module)
            return Member(tree, module) if tree is not None else None
        member = self._name(module, owner)
        if member is None or not attribute:
            return member
        if not isinstance(member.node, ast.ClassDef):
            return None
        return self.members(member.module, member.node).get(attribute)

    def members(self, module: str, owner: ast.ClassDef) -> dict[str, Member]:
        """Attributes of a class: of its body, set by its methods, and of its bases."""
        found: dict[str, Member] = {}
        for base in owner.bases:
            if isinstance(base, ast.Name) and base.id != owner.name:
                member = self._name(module, base.id)
                if member is not None and isinstance(member.node, ast.ClassDef):
                    found.update(self.members(member.module, member.node))
        if owner.name == "ServerArgs":
            found.update(self._server_fields())
        own: dict[str, Member] = {}
        for name, node in _attributes(owner):  # a field is declared before it is set
            own.setdefault(name, Member(node, module))
        return {**found, **own}

    def _server_fields(self) -> dict[str, Member]:
        """Fields that newer releases put together from one class per topic."""
        found = {}
        for file in self.files:
            if file.startswith(_FIELDS):
                name = file.removesuffix(".py").replace("/", ".")
                tree = self._module(name)
                for owner in ast.walk(tree) if tree else ():
                    if isinstance(owner, ast.ClassDef):
                        for line in owner.body:
                            if isinstance(line, ast.AnnAssign) and isinstance(
                                line.target, ast.Name
                            ):
                                found[line.target.id] = Member(line, name)
        return found

    def _name(self, module: str, name: str) -> Member | None:
        tree = self._module(module)
        for node in _statements(tree.body if tree else []):
            if name in _defines(node):
                return Member(node, module)
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    if (alias.asname or alias.name) == name and node.module.startswith("sglang"):
                        return self._name(node.module, alias.name)
        return None

    def _module(self, name: str) -> ast.Module | None:
        if name not in self._modules:
            stem = name.replace(".", "/")
            files = set(self.files)
            file = next((f for f in (f"{stem}.py", f"{stem}/__init__.py") if f in files), None)
            self._modules[name] = ast.parse(self.text(file)) if file else None
        return self._modules[name]

    def setters(self, setter: str) -> dict[str, list[str]]:
        """Model file -> how each of its classes' `setter` sets the capture points."""
        found = {}
        for file in self.files:
            if not file.startswith("sglang/srt/models/"):
                continue
            text = self.text(file)
            if f"def {setter}(" not in text:
                continue
            found[file.removeprefix("sglang/srt/models/")] = [
                _how_set(node, setter)
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.FunctionDef) and node.name == setter
            ]
        return found

    def has_flag(self, flag: str) -> bool:
        """Does the command line take `flag`: written out, or made from a field's name?"""
        name = flag.removeprefix("--").replace("-", "_")
        field = self.find(f"sglang.srt.server_args:ServerArgs.{name}")
        if field is not None and isinstance(field.node, ast.AnnAssign):
            annotation = ast.unparse(field.node.annotation)
            if annotation.startswith("A[") and "no_cli=True" not in annotation:
                return True
        files = [f for f in self.files if f.startswith("sglang/srt/arg_groups/")]
        return any(f'"{flag}"' in self.text(file) for file in ["sglang/srt/server_args.py", *files])


def _how_set(function: ast.FunctionDef, setter: str) -> str:
    """flags, list, delegates, or unknown."""
    kinds = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called.endswith(f".{setter}"):
                kinds.add("delegates")
            if called == "setattr" and "_is_layer_to_capture" in ast.unparse(node.args[1]):
                kinds.add("flags")
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            kinds.update({"layers_to_capture": {"list"}}.get(node.attr, set()))
    return next((kind for kind in ("flags", "list", "delegates") if kind in kinds), "unknown")


def _mismatch(node: ast.AST, target: Symbol) -> str | None:
    places = " or ".join(target.places)
    if target.parameters:
        if not isinstance(node, ast.FunctionDef):
            return f"{places} is no function ({target.why})"
        names = [argument.arg for argument in node.args.args]
        got = tuple(name for name in names if name not in ("self", "cls"))
        if got[: len(target.parameters)] != target.parameters:
            return f"{places} takes {got}, not {target.parameters} ({target.why})"
    if target.value is not None:
        value = getattr(node, "value", None)
        if not isinstance(value, ast.Constant) or value.value != target.value:
            return f"{places} is {ast.unparse(node)}, not {target.value!r} ({target.why})"
    if target.calls is not None:
        called = {ast.unparse(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)}
        if target.calls not in called:
            return f"{places} does not call {target.calls} ({target.why})"
    return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, those under top-level `if` and `try` included."""
    for node in body:
        yield node
        for part in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
                yield from _statements(getattr(node, part, []))


def _defines(node: ast.AST) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = {ast.Assign: "targets", ast.AnnAssign: "target"}.get(type(node))
    if targets is None:
        return set()
    found = getattr(node, targets)
    names = found if isinstance(found, list) else [found]
    flat = [part for name in names for part in getattr(name, "elts", [name])]
    return {name.id for name in flat if isinstance(name, ast.Name)}


def _attributes(owner: ast.ClassDef) -> Iterator[tuple[str, ast.AST]]:
    for line in _statements(owner.body):
        for name in _defines(line):
            yield name, line
        if not isinstance(line, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(line):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if ast.unparse(node.value) == "self":
                    yield node.attr, node
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
                first, second = (*node.args, None, None)[:2]
                if first is not None and ast.unparse(first) == "self":
                    if isinstance(second, ast.Constant) and isinstance(second.value, str):
                        yield second.value, node


def in_continuous_integration() -> bool:
    return os.environ.get("CI", "").lower() in ("1", "true")

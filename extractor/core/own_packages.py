"""Imports our top-level packages although packages of a user have the same names.

Our modules import each other by absolute names, so the names must be ours while they load:

- A command owns its process, and those that it starts: `put_first` makes the names ours for good.
  (Only where they are not, as it puts a whole site-packages folder first.)
- A library does not: within `importing_own` the names are ours, and afterwards the user's again.
  Our modules work on, as they import nothing of ours inside functions, and pickle nothing of ours:
  worker processes find their modules by place (`prompts.worker_process`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from os.path import dirname, join, realpath
from threading import RLock
from types import ModuleType

NAMES = ("manifest", "prompts", "server_patch")
ROOT = dirname(dirname(dirname(realpath(__file__))))

_lock = RLock()
#: Our modules under `NAMES`, while the names are the user's.
_hidden: dict[str, ModuleType] = {}


class _Finder:
    """Finds our packages under `ROOT`, and nothing else."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [ROOT]) if name in NAMES else None


def put_first() -> None:
    """Make the names ours, for this process and its children."""
    if not all(map(_is_ours, NAMES)):
        sys.path.insert(0, ROOT)
        path = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = ROOT if not path else f"{ROOT}{os.pathsep}{path}"
        os.environ["PYTHONSAFEPATH"] = "1"  # or `python -m` puts the working directory first


@contextmanager
def importing_own() -> Iterator[None]:
    """Make the names ours within the block, for all threads of the process."""
    with _lock:
        if all(map(_is_ours, NAMES)):
            yield
            return
        theirs = _taken()
        sys.modules.update(_hidden)
        sys.meta_path.insert(0, _Finder)
        try:
            yield
        finally:
            sys.meta_path.remove(_Finder)
            _hidden.update(_taken())
            sys.modules.update(theirs)


def _is_ours(name: str) -> bool:
    """Whether `name` is imported from our package, or would be."""
    module = sys.modules.get(name)
    if module is not None:
        origin = getattr(module, "__file__", None)
    else:
        spec = find_spec(name)
        origin = None if spec is None else spec.origin
    return origin is not None and realpath(origin) == join(ROOT, name, "__init__.py")


def _taken() -> dict[str, ModuleType]:
    """The modules under `NAMES`, removed from `sys.modules`."""
    names = [name for name in sys.modules if name.partition(".")[0] in NAMES]
    return {name: sys.modules.pop(name) for name in names}

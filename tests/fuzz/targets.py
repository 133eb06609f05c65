"""All targets, a module for each group. A child imports the module of its group alone."""

from __future__ import annotations

from importlib import import_module

from fuzz.target import Target

GROUPS = ("dump", "data_set", "prompt", "column", "server")


def group(name: str) -> dict[str, Target]:
    """The targets of a group by name."""
    module = import_module(f"fuzz.{name}_targets")
    return {target.name: target for target in module.TARGETS}

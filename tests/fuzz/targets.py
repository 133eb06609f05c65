"""All targets by name."""

from __future__ import annotations

from fuzz import data_set_targets, dump_targets, prompt_targets, server_targets
from fuzz.target import Target

TARGETS: dict[str, Target] = {
    target.name: target
    for module in (dump_targets, data_set_targets, prompt_targets, server_targets)
    for target in module.TARGETS
}
GROUPS = list(dict.fromkeys(target.group for target in TARGETS.values()))


def group(name: str) -> list[Target]:
    return [target for target in TARGETS.values() if target.group == name]

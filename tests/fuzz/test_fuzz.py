"""No input ends in a traceback, a hang, a death of the process, or much memory."""

from __future__ import annotations

import pytest

from fuzz.campaign import faults_of
from fuzz.targets import GROUPS, group

pytestmark = [pytest.mark.timeout(600)]

#: Inputs of each target that the daily tests try.
SLICE = 4


def require_no_faults(name: str, seeds: dict[str, range]) -> None:
    faults = faults_of(name, seeds)
    assert not faults, "\n".join(["", *map(str, faults)])


@pytest.mark.slow
@pytest.mark.parametrize("name", GROUPS)
def test_no_input_is_a_fault(name: str) -> None:
    counts = {target.name: target.count for target in group(name).values()}
    require_no_faults(name, {target: range(count) for target, count in counts.items()})


@pytest.mark.parametrize("name", GROUPS)
def test_the_first_inputs_of_each_target_are_no_fault(name: str) -> None:
    require_no_faults(name, {target: range(SLICE) for target in group(name)})


def test_there_are_many_inputs_and_no_name_comes_twice() -> None:
    targets = [target for name in GROUPS for target in group(name).values()]
    assert len({target.name for target in targets}) == len(targets)
    assert sum(target.count for target in targets) >= 15_000

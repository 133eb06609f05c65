"""The main cases of the fault matrix; `make faults` runs all."""

from __future__ import annotations

import pytest

from faults.arena import undisturbed_digests
from faults.cases import all_cases
from faults.matrix import play

pytestmark = [pytest.mark.crash, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, str]:
    """Digests of a run that nothing happens to."""
    return undisturbed_digests()


@pytest.mark.parametrize("name", [case.name for case in all_cases() if case.is_main])
def test_nothing_is_lost_and_nothing_comes_twice(name: str, undisturbed: dict[int, str]) -> None:
    outcome = play(name, undisturbed)
    if outcome.is_skipped:
        pytest.skip(outcome.problem or "")
    assert outcome.problem is None, outcome.problem


def test_every_case_has_a_name_of_its_own() -> None:
    cases = all_cases()
    assert len({case.name for case in cases}) == len(cases)
    assert len(cases) > 300

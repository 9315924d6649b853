"""Operations with parts of the fleet killed or stopped while they are under way: the bits, the events, the devices."""

from __future__ import annotations

import pytest

from tests.fleet.torture import Torture, scenario

pytestmark = pytest.mark.slow

# Chosen so that every kind of operation and of fault comes, and resizes with most of them, in about six minutes.
SEEDS = (12, 45, 56, 66, 128, 140, 174)


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: str(scenario(seed)))
def test_a_job_ends_with_its_bits_whatever_is_killed(fleet, tmp_path, untouched, seed):
    Torture(fleet, tmp_path / "work", untouched).run(scenario(seed))

"""Operations with parts of the fleet killed or stopped while they are under way: the bits, the events, the devices."""

from __future__ import annotations

import pytest

from tests.fleet.torture import Torture, scenario

pytestmark = pytest.mark.slow

# Chosen so that every kind of operation and nearly every kind of fault comes, in about six minutes.
SEEDS = (15, 19, 20, 21, 31, 36, 42, 43)


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: str(scenario(seed)))
def test_a_job_ends_with_its_bits_whatever_is_killed(fleet, tmp_path, untouched, seed):
    Torture(fleet, tmp_path / "work", untouched).run(scenario(seed))

"""Gives tiers to the jobs of a trace that has none. They are synthetic: whoever shows a figure says so beside it."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from model.errors import ModelError
from model.job_spec import Tier
from scheduling.simulator.workload import TraceJob


@dataclass(frozen=True, slots=True)
class TierShares:
    """How many of a hundred jobs are of each tier."""

    premium: float
    standard: float
    basic: float

    @classmethod
    def parse(cls, text: str) -> TierShares:
        """Reads ``20,40,40``: premium, standard and basic, in percent.

        Raises:
            ModelError: ``simulate.tiers``: not three shares that make up 100.
        """
        try:
            shares = [float(part) for part in text.split(",")]
        except ValueError:
            shares = []
        if len(shares) != 3 or not all(0 <= share <= 100 for share in shares) or abs(sum(shares) - 100) > 1e-6:
            raise ModelError(
                f"--tiers is {text!r}, but must be three shares that make up 100: premium, standard, basic.",
                code="simulate.tiers",
                remedy="Write for example --tiers 20,40,40.",
            )
        return cls(*shares)

    def __str__(self) -> str:
        return f"{self.premium:g} % premium, {self.standard:g} % standard, {self.basic:g} % basic"


def assign_tiers(jobs: Sequence[TraceJob], shares: TierShares, seed: int) -> tuple[list[TraceJob], int]:
    """The same jobs, all with a tier, and how many of these were given here.

    A job's tier depends on its id and the seed alone: it is the same in whatever company the job is simulated.
    """
    given = [job if job.tier else replace(job, tier=_tier(job.id, shares, seed)) for job in jobs]
    return given, sum(not job.tier for job in jobs)


def _tier(id: str, shares: TierShares, seed: int) -> Tier:
    digest = hashlib.blake2b(f"{seed}/{id}".encode(), digest_size=8).digest()
    point = int.from_bytes(digest) / 2**64 * 100
    bounds = itertools.accumulate((shares.premium, shares.standard))
    return next((tier for tier, bound in zip(Tier, bounds, strict=False) if point < bound), Tier.BASIC)

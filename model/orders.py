"""What an operator orders of a cluster's scheduler v1: by the signal ``inbox``, see `model.control.InboxBatch`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from model.errors import ModelError
from model.ids import TenantId
from model.shape import Shape
from model.units import counted


@dataclass(frozen=True, slots=True)
class NodeOrder(Shape):
    """What an operator wants of a node, by name: it counts for later incarnations too, until another order.

    ``cordon``: nothing new is placed there; ``drain``: and its jobs go on elsewhere; ``uncordon``: neither.
    """

    node: str
    order: Literal["cordon", "drain", "uncordon"]


@dataclass(frozen=True, slots=True)
class QuotaOrder(Shape):
    """What an operator grants a tenant, until another order. Tenants are a tree.

    Attributes:
        quota: devices times level that may be promised to it and those below it; None for any.
        weight: its share of what the basic tier gets, beside other tenants.
        under: the tenant above it: what is promised here counts there too; None for none.
    """

    tenant: TenantId
    quota: float | None = None
    weight: float = 1.0
    under: TenantId | None = None

    def __post_init__(self) -> None:
        if not (self.quota is None or 0 <= self.quota < 1e9) or not 0 < self.weight < 1e9:
            raise ModelError(
                f"A quota of {counted(self.quota or 0, 'device')} with the weight {self.weight} for the tenant "
                f"{self.tenant}.",
                code="model.quota",
                remedy="A quota is from 0, a weight above 0.",
            )

"""Who gives way: nodes are chosen, not victims, so that few jobs stop, and what they free is where it is needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from math import floor

from scheduling.core.indexes import Buckets
from scheduling.core.model import Job, Node, Pool, State
from scheduling.core.placing import Places
from scheduling.core.service import endurance, lead_s
from scheduling.core.settings import BASIC, HOUR_S, LENT, LEVELS, PREMIUM, STANDARD, Settings
from scheduling.core.waiting import Waiting

_FULL_SLACK_S = (1.0 - LEVELS[STANDARD]) * HOUR_S


@dataclass(slots=True)
class Reclaim:
    """A way to a place: devices of each node, and what each victim keeps (nothing: it stops).

    Attributes:
        cost: device-seconds that the victims lose.
        stops: devices of victims that stop.
        tried: how many nodes were looked at.
        moves: those of the victims that keep their width, on other nodes.
    """

    places: Places = field(default_factory=dict[Node, int])
    victims: dict[Job, Places] = field(default_factory=dict[Job, Places])
    cost: float = 0.0
    stops: int = 0
    tried: int = 0
    moves: bool = False


class Reclaimer:
    """Looks for the cheapest way for one job to `width` more devices in a pool."""

    def __init__(
        self, settings: Settings, waiting: Waiting, job: Job, width: int, now: float, rank: int, urgent: bool
    ) -> None:
        self.settings = settings
        self.job = job
        self.width = width
        self.now = now
        self.rank = rank
        entering = job.admitted is None and job.guaranteed
        self.steal_s = settings.enter_slack_s if entering else settings.steal_slack_s / (3 if urgent else 1)
        self.urgent = urgent
        self.most = 1e9 if urgent else settings.blast * width
        self.aged = rank == BASIC and now - job.waits_since >= settings.age_s
        self._band = waiting.band
        self._own_band = waiting.band(job, now)
        # One that is to be admitted has waited enough.
        self._slack = endurance(job, now) if job.admitted is not None else 0.0
        self._eligible: dict[Job, bool] = {}
        # The longer it has waited, the less long others need have run: its turn comes whatever they are.
        self._quantum_s = settings.aged_quantum_s * settings.age_s / max(settings.age_s, now - job.waits_since)

    def find(self, pool: Pool) -> Reclaim | None:
        """The cheapest way, or None: then nothing is disturbed."""
        takes_mid = self.rank <= STANDARD or self.aged
        short = self.settings.short if self.aged else self.settings.enter_short
        if takes_mid and (self.aged or self.job.admitted is None) and pool.short > short * pool.capacity:
            takes_mid = False
        if pool.free + pool.low + (pool.mid if takes_mid else 0) < self.width:
            return None
        found = self._search(pool, pool.by_low)
        if found is None and takes_mid:
            found = self._search(pool, pool.by_mid)
        return found

    def _search(self, pool: Pool, index: Buckets) -> Reclaim | None:
        width, size = self.width, pool.size
        if width > size:
            return self._gang(pool, index)
        best: tuple[bool, float] | None = None
        found: Reclaim | None = None
        each = max(2, self.settings.reclaim_nodes // max(1, size - width + 1))
        tried = 0
        for order in self._orders(pool, index, index.upwards(width, each), width, self.settings.reclaim_nodes):
            way = Reclaim()
            tried += 1
            if not self._clear(pool.by_order[order], width, way):
                continue
            key = (way.stops > self.settings.blast * max(width, 1), way.cost)
            if best is None or key < best:
                best, found = key, way
        if found is not None:
            found.tried = tried
        if found is None and self.job.unit < width:
            return self._several(pool, index)
        return found

    def _gang(self, pool: Pool, index: Buckets) -> Reclaim | None:
        """Whole nodes, the cheapest of some; then the rest on one more."""
        size = pool.size
        count, rest = divmod(self.width, size)
        looked_at = self.settings.reclaim_nodes + 4 * count
        if len(index.buckets) <= size or index.counts[size] < count or size % self.job.unit:
            return self._several(pool, index)
        priced: list[tuple[float, str]] = []
        total = Reclaim()
        names = (order for _, order in index.buckets[size].islice(0, looked_at))
        for order in self._orders(pool, index, names, size, looked_at):
            way = Reclaim()
            total.tried += 1
            if self._clear(pool.by_order[order], size, way):
                priced.append((way.cost, order))
        priced.sort()
        queue = [order for _, order in priced]
        while len(total.places) < count and queue:
            order = queue.pop(0)
            node = pool.by_order[order]
            if node in total.places:
                continue
            before = len(total.victims)
            if self._clear(node, size, total):
                # Where a whole gang has to stop, its other nodes cost nothing more.
                for victim in list(total.victims)[before:]:
                    if not total.victims[victim]:
                        others = sorted(other.order for other in victim.given if other not in total.places)
                        queue[:0] = [name for name in others if self._is_cleared(pool, name, size, total)]
        if len(total.places) < count:
            return self._several(pool, index)
        if rest:
            for order in index.upwards(rest, 4 + count):
                node = pool.by_order[order]
                total.tried += 1
                if node not in total.places and self._clear(node, rest, total):
                    return total
            return self._several(pool, index)
        return total

    def _several(self, pool: Pool, index: Buckets) -> Reclaim | None:
        """No node alone is enough: the nodes with the most to give, as few as possible."""
        tries = self.settings.reclaim_nodes + 4 * (self.width // max(1, pool.size) + 1)
        total, left, unit = Reclaim(), self.width, self.job.unit
        for order in self._orders(pool, index, index.downwards(unit), unit, tries):
            node = pool.by_order[order]
            total.tried += 1
            if node in total.places:
                continue
            part = min(self._most(node, total), left) // unit * unit
            if part and self._clear(node, part, total):
                left -= part
                if not left:
                    return total
        return None

    def _orders(self, pool: Pool, index: Buckets, names: Iterable[str], width: int, most: int) -> Iterator[str]:
        """So many nodes to look at; first those of standard jobs that can spare time, undisturbed longest."""
        seen: dict[str, None] = {}  # a node may be there for several of its jobs
        if index is pool.by_mid:
            each = max(2, most // max(1, pool.size - width + 1))
            seen = dict.fromkeys(islice(pool.spares.until(width, floor(self.now), each), most))
            yield from seen
        yield from islice((name for name in names if name not in seen), max(2, most - len(seen)))

    def _most(self, node: Node, total: Reclaim) -> int:
        return node.free + sum(
            count for victim, count in node.jobs.items() if victim in total.victims or self._may_take(victim)
        )

    def _is_cleared(self, pool: Pool, order: str, size: int, total: Reclaim) -> bool:
        node = pool.by_order.get(order)
        return (
            node is not None
            and node.free
            + sum(
                count - total.victims[victim].get(node, 0)
                for victim, count in node.jobs.items()
                if victim in total.victims
            )
            >= size
        )

    # -- one node -------------------------------------------------------------------------------------------------

    def _clear(self, node: Node, width: int, way: Reclaim) -> bool:
        """Adds to `way` what makes `width` devices of a node free; False (and nothing added) where that cannot be."""
        if node.closed:
            return False
        need = width - node.free
        for victim, kept in way.victims.items():
            need -= node.jobs.get(victim, 0) - kept.get(node, 0)
        added: list[tuple[Job, Places, int, float]] = []
        if need > 0:
            options = [
                (self._reluctance(victim), victim)
                for victim in node.jobs
                if victim not in way.victims and self._may_take(victim)
            ]
            options.sort(key=lambda item: item[0])
            for _, victim in options:
                kept, freed, cost = self._shed(victim, node, need)
                lost = victim.width - sum(kept.values())
                if victim.rank == STANDARD and lost > self.most:
                    continue  # it will want back all of that at once
                added.append((victim, kept, freed, cost))
                need -= freed
                if need <= 0:
                    break
            if need > 0:
                return False
            self._prune(added, need)
        for victim, kept, _, cost in added:
            way.victims[victim] = kept
            way.cost += cost
            way.stops += 0 if kept else victim.width
        way.places[node] = width
        return True

    @staticmethod
    def _prune(added: list[tuple[Job, Places, int, float]], need: int) -> None:
        """Spares whom it can do without, the most expensive first."""
        spare = -need
        for item in sorted(added, key=lambda item: (-item[3], item[0].id)):
            if len(added) > 1 and item[2] <= spare:
                added.remove(item)
                spare -= item[2]

    def _shed(self, victim: Job, node: Node, need: int) -> tuple[Places, int, float]:
        """What a victim keeps so that up to `need` devices of a node become free, how many do, and what that costs."""
        here = victim.given[node]
        wanted = min(need, here)
        width = next((w for w in reversed(victim.widths) if w <= victim.width - wanted), 0)
        price = self.settings.pause_s * victim.width
        if not width:
            price = 2.0 * price + self.settings.stop_cost_s
        if victim.rank == STANDARD:
            # It will want back all that it loses, and the sooner, the less slack it has left.
            price += self.settings.regain_s * (victim.width - width)
            price *= 1.5 + 3.0 * max(0.0, 1.0 - endurance(victim, self.now) / _FULL_SLACK_S)
        if not width:
            return {}, here, price
        kept = dict(victim.given)
        spare = victim.width - width
        for other in [node, *sorted(kept, key=lambda other: (kept[other], other.order))]:
            part = min(spare, kept.get(other, 0))
            if part:
                spare -= part
                kept[other] -= part
                if not kept[other]:
                    del kept[other]
        return kept, here - kept.get(node, 0), price

    def _reluctance(self, victim: Job) -> tuple[int, int, int, float, str]:
        if victim.rank == STANDARD:
            return -STANDARD, 0, 0, -endurance(victim, self.now), victim.id
        return (
            -victim.rank,
            0 if len(victim.given) == 1 else 1,
            -self._band(victim, self.now),
            -victim.changed,
            victim.id,
        )

    def _may_take(self, victim: Job) -> bool:
        known = self._eligible.get(victim)
        if known is None:
            known = self._eligible[victim] = self._judge(victim)
        return known

    def _judge(self, victim: Job) -> bool:
        settings, own, rank = self.settings, self.rank, victim.rank
        if victim.state is not State.RUNNING or victim.claim or victim is self.job or rank == PREMIUM:
            return False
        if rank > own and not (own == LENT and rank == BASIC):
            # Who is strictly above need not wait: there can be no taking turns.
            return rank != STANDARD or endurance(victim, self.now) >= lead_s(victim, settings)
        ran = self.now - victim.changed
        if ran < settings.cool_s[rank]:
            return False
        if rank == STANDARD:
            own_slack = 0.0 if own > STANDARD else max(0.0, self._slack)
            # One that is narrow will soon want back what it lacks.
            may = (own == STANDARD or self.aged) and (self.urgent or victim.width == victim.ranks)
            return may and endurance(victim, self.now) - own_slack >= self.steal_s
        if own == LENT and rank == BASIC:
            return True
        if self.aged:
            return ran >= self._quantum_s
        return rank == BASIC and ran >= settings.quantum_s and self._band(victim, self.now) > self._own_band

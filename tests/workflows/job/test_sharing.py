"""Incidents where ranks share a device: each is an event, and a sentence in `ergo show`, however often it is told."""

from __future__ import annotations

from types import SimpleNamespace

from events.types import SharingIncident
from infra.incidents import FIRST_GAP_S, IncidentTeller
from model.control import JobView
from model.names import Signal
from model.sharing import SharingIncidents, SharingNotice
from tests.workflows.job.fleet import Fleet, Handle, ends, until


async def two(fleet: Fleet) -> Handle:
    job = await fleet.submit(ranks=2)
    await job.run_on(fleet.nodes[0].device(0), fleet.nodes[0].device(1))
    await job.steps(fleet.nodes[0])
    return job


def sentences(view: JobView) -> dict[str, list[str]]:
    """What `ergo show` tells, by what it is about."""
    found: dict[str, list[str]] = {}
    for one in view.decisions:
        found.setdefault(one.action, []).append(one.reason)
    return {action: reasons for action, reasons in found.items() if action.startswith("sharing")}


async def tell(job: Handle, view: JobView, found: SharingIncidents) -> None:
    await job.workflow.signal(Signal.SHARING, SharingNotice(view.epoch, job.fleet.nodes[0].id, found))


async def test_each_incident_is_an_event_and_is_told_once(fleet: Fleet) -> None:
    job = await two(fleet)
    view = await job.show()
    for _ in range(2):
        await tell(job, view, SharingIncidents(2))
        await tell(job, view, SharingIncidents(3, 1, ("aten::mm",)))
    await tell(job, view, SharingIncidents(1))  # late
    shown = sentences(await job.show())
    (limit,), (mismatch,) = shown["sharing: time-limit"], shown["sharing: mismatch"]
    assert "3 times" in limit and "changes no number" in limit
    assert "once" in mismatch and mismatch.endswith("Not shared there any more: aten::mm.")
    events = [event.data for event in await ends(job) if isinstance(event, SharingIncident)]
    told = [(data.kind, data.count, data.total, data.unshared) for data in events]
    assert told == [("time-limit", 2, 2, ()), ("time-limit", 1, 3, ()), ("mismatch", 1, 1, ("aten::mm",))]
    assert {data.node for data in events} == {fleet.nodes[0].id}


async def test_what_a_node_has_not_told_before_the_end_comes_with_the_end(fleet: Fleet) -> None:
    job = await two(fleet)
    fleet.nodes[0].part(job.id).sharing = SharingIncidents(0, 1, ("aten::addmm",))
    events = [event.data for event in await ends(job) if isinstance(event, SharingIncident)]
    assert [(data.kind, data.count, data.unshared) for data in events] == [("mismatch", 1, ("aten::addmm",))]


async def test_a_node_tells_a_mismatch_at_once_and_time_limits_now_and_then(fleet: Fleet) -> None:
    job = await two(fleet)
    part, epoch = fleet.nodes[0].part(job.id), (await job.show()).epoch

    teller = IncidentTeller(
        fleet.client, fleet.nodes[0].id, lambda: [SimpleNamespace(job=job.id, epoch=epoch, progress=part.progress)]
    )

    async def told(*wanted: tuple[str, int]) -> None:
        def found() -> bool:
            events = (event.data for event in fleet.sink.of(job.id) if isinstance(event, SharingIncident))
            return [(data.kind, data.total) for data in events] == [*wanted]

        await until(found, f"told: {wanted}")

    await teller.look(0.0)
    part.sharing = SharingIncidents(1)
    await teller.look(0.0)
    await told(("time-limit", 1))
    part.sharing = SharingIncidents(7)
    await teller.look(FIRST_GAP_S / 2)
    part.sharing = SharingIncidents(8, 1, ("aten::mm",))
    await teller.look(FIRST_GAP_S / 2)
    await told(("time-limit", 1), ("time-limit", 8), ("mismatch", 1))
    part.sharing = SharingIncidents(9, 1, ("aten::mm",))
    await teller.look(FIRST_GAP_S)
    await teller.look(FIRST_GAP_S * 3)
    await told(("time-limit", 1), ("time-limit", 8), ("mismatch", 1), ("time-limit", 9))
    await ends(job)

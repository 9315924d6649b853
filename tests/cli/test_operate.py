"""`ergo node`, `ergo quota` and `ergo sla` against a real scheduler on a real Temporal server."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta

import pytest

from activities.cluster import ClusterActivities
from activities.snapshots import Snapshots
from cli.fleet.operate import quotas
from cli.fleet.sla import services
from infra.cluster_worker import cluster_worker
from model.ids import TenantId
from model.job_state import JobPhase
from model.names import cluster_workflow_id
from model.orders import QuotaOrder
from tests.cli.samples import NODE_1, node
from tests.scheduling.builders import Cluster, device_ids, notice
from tests.scheduling.builders import node as node_notice


@pytest.mark.slow
async def test_orders_reach_the_scheduler_and_are_shown(ergo, client, store):
    store.claim_node(node(NODE_1))
    activities = ClusterActivities(client, store)
    inbox = activities.inbox("local")
    async with cluster_worker(client, activities):
        try:
            runs = {"phase": JobPhase.RUNNING, "wants": "nothing", "devices": device_ids("node-1", 2)}
            await inbox.tell(node_notice("node-1"), notice("gpt", 2, **runs))
            assert (await ergo("node", "cordon", "node-1")).err == "ergo: node-1 is cordoned\n"
            fields = json.loads((await ergo("fleet", "--json")).out)
            assert [seen["order"] for seen in fields["nodes"]] == ["cordoned"]
            assert (await ergo("quota", "set", "default", "1.5", "--weight", "2")).err == (
                "ergo: default: 1.5 devices, weight 2\n"
            )
            (row,) = json.loads((await ergo("quota", "show", "--json")).out)
            assert row == {
                "tenant": "default", "under": "", "quota": 1.5, "promised": 0.0, "holds": 2, "weight": 2.0,
            }  # fmt: skip
            (row,) = json.loads((await ergo("sla", "report", "--json")).out)
            assert (row["tier"], row["level"], row["jobs"], row["job_hours"]) == ("basic", None, 1, 0)
            # Nobody plays the job: told to leave, it turns out to be gone.
            assert "node-1 is drained" in (await ergo("node", "drain", "node-1", "--wait")).err
            assert (await ergo("node", "uncordon", "node-1")).err == "ergo: node-1 is used again\n"
            unknown = await ergo("node", "drain", "node-9", code=1)
            assert unknown.err == "ergo: There is no node node-9. The fleet has node-1.\n"
            state = await asyncio.to_thread(Snapshots(store, "local").newest)
            assert state is not None and state.cordoned == ()
        finally:
            await client.get_workflow_handle(cluster_workflow_id("local")).terminate(rpc_timeout=timedelta(seconds=5))


def test_quotas_and_services_of_a_state():
    cluster = Cluster(node_notice("node-1", 8))
    cluster.tell(QuotaOrder(TenantId("org"), 4.0), QuotaOrder(TenantId("team"), under=TenantId("org")))
    cluster.tell(QuotaOrder(TenantId("org"), 4.0, under=TenantId("team")))
    cluster.tell(notice("prem", 2, "premium", tenant=TenantId("team")), notice("gpt", 2))
    cluster.run("prem")
    cluster.run("gpt")
    cluster.tell(after=3 * 3600)
    assert [(row.tenant, row.quota, row.promised, row.holds) for row in quotas(cluster.state)] == [
        ("default", None, 0.0, 2),
        ("org", 4.0, 1.9, 2),
        ("team", None, 1.9, 2),
    ]
    found = services(cluster.state, cluster.now)
    assert [(row.tenant, str(row.tier), row.jobs, row.hours, row.below, row.served_s) for row in found] == [
        ("default", "basic", 1, 0, 0, 21600.0),
        ("team", "premium", 1, 3, 0, 21600.0),
    ]

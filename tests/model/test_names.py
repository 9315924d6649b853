from model.ids import NodeId
from model.names import JOB_WORKFLOW, Query, SearchAttribute, Signal, Update, node_task_queue


def test_names_are_part_of_v1_and_stay():
    # A client in any language has these in its source. To change one is a new version.
    assert JOB_WORKFLOW == "Job"
    assert [*Update] == ["preempt", "resume", "checkpoint", "migrate", "resize", "cancel"]
    assert [*Signal] == ["placement", "inbox", "renew", "sharing"]
    assert [*Query] == ["show", "explain"]
    assert [*SearchAttribute] == ["ErgoTenant", "ErgoTier", "ErgoPhase", "ErgoEpoch", "ErgoWidth", "ErgoNodes"]
    assert node_task_queue(NodeId("node-7", 2)) == "node/node-7@2"

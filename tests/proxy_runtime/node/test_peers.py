from __future__ import annotations

import pytest

from model.ids import Epoch, JobId, NodeId
from model.runtime import StopInput
from proxy_runtime.node.errors import NodeError
from proxy_runtime.node.peers import Peers
from proxy_runtime.node.storage import Storage
from tests.proxy_runtime.node.conftest import World

JOB = JobId("job-1")


def peers(world: World, token: str = "") -> Peers:
    return Peers(Storage(world.fleet, world.root / "asker").address, token or world.fleet.peer_token)


def test_a_node_that_does_not_prepare_is_named_when_time_is_over(world: World) -> None:
    with pytest.raises(NodeError, match="node-2@1 did not prepare") as caught:
        peers(world).endpoints(JOB, Epoch(1), [world.two.node], 0.5, over=lambda: False)
    assert caught.value.code == "runtime.deadline"


def test_a_node_of_another_incarnation_is_not_asked(world: World) -> None:
    with pytest.raises(NodeError, match="node-2@9"):
        peers(world).endpoints(JOB, Epoch(1), [NodeId("node-2", 9)], 0.5, over=lambda: False)


def test_a_node_that_knows_a_higher_epoch_says_so_at_once(world: World) -> None:
    world.two.runtime.stop(StopInput(JOB, Epoch(5), "it was elsewhere"))
    with pytest.raises(NodeError, match="epoch 5 counts") as caught:
        peers(world).endpoints(JOB, Epoch(3), [world.two.node], 30.0, over=lambda: False)
    assert caught.value.code == "runtime.fenced"


def test_a_part_that_is_stopped_meanwhile_asks_no_more(world: World) -> None:
    with pytest.raises(NodeError) as caught:
        peers(world).endpoints(JOB, Epoch(1), [world.two.node], 30.0, over=lambda: True)
    assert caught.value.code == "node.stopped"


def test_a_stranger_learns_nothing(world: World) -> None:
    with pytest.raises(NodeError, match="401"):
        peers(world, "wrong").endpoints(JOB, Epoch(1), [world.two.node], 0.5, over=lambda: False)

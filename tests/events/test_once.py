"""The rule of every consumer, without a broker."""

from hypothesis import given
from hypothesis import strategies as st

from events.consumer import Once
from model.ids import NodeId
from tests.events.test_kafka import NODE, START, context, decided, queued


def admitted(events):
    once = Once()
    return [event for event in events if once.admit(event)]


@given(st.lists(st.integers(1, 8), max_size=6), st.integers(1, 8))
def test_batches_that_are_repeated_count_once(cuts, total):
    """A publisher repeats its batch from where it was not acknowledged, any number of times."""
    events = [queued("j", number) for number in range(1, total + 1)]
    delivered = [event for cut in cuts for event in events[: min(cut, total)]] + events
    assert admitted(delivered) == events


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_epochs_never_go_back(epochs):
    events = [queued("j", number, epoch=epoch) for number, epoch in enumerate(epochs, 1)]
    kept = [int(event.epoch) for event in admitted(events)]
    assert kept == sorted(kept)
    assert max(epochs) in kept


def test_jobs_topics_generations_and_nodes_are_apart():
    events = [
        queued("a", 5, epoch=9),
        queued("b", 1, epoch=1),
        decided("a", 6, epoch=1),
        queued("a", 1, epoch=9, generation=1),
    ]
    assert admitted(events) == events


def test_reports_of_a_node_count_once_and_forwards():
    from events.types import HostReport, NodeReported, NodeReportedData

    def report(node, start, number):
        host = HostReport(cores=1, load_1m=0, memory_total_bytes=1, memory_available_bytes=1, disk_free_bytes=1)
        data = NodeReportedData(node=node, devices=(), jobs=(), host=host)
        where = {"source": context("j", 1)["source"], "time": START, "subject": node, "data": data}
        return NodeReported(id=f"{node}/{start}/{number}", **where)

    other = NodeId("node-2", 1)
    delivered = [report(NODE, 5, 1), report(NODE, 5, 1), report(NODE, 5, 2), report(NODE, 4, 9), report(NODE, 6, 1)]
    delivered.append(report(other, 1, 1))
    assert [event.id for event in admitted(delivered)] == [
        "node-1@1/5/1",
        "node-1@1/5/2",
        "node-1@1/6/1",
        "node-2@1/1/1",
    ]

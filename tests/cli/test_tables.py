"""What people and programs see of jobs and nodes, at a fixed width."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import timedelta

import pytest
from rich.console import Console

from cli.fleet import nodes, ps, show, words
from cli.fleet.follow import exit_code, line, news
from cli.fleet.logs import Lines
from cli.fleet.nodes import Overview
from cli.fleet.overview import Listing, in_order, live_step, row_of_view, visibility_query
from model.cluster import ClusterView
from model.ids import Epoch, JobId, Step
from model.job_state import JobPhase
from model.records import JobOnNode
from tests.cli.samples import NODE_1, NODE_2, START, at, device, node, view

NOW = START + timedelta(hours=2, minutes=5)


def shown(content: object, width: int = 130) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, no_color=True).print(content)
    return [line.rstrip() for line in out.getvalue().splitlines()]


WAITING = view(
    "digits-abc234",
    name="digits",
    phase=JobPhase.QUEUED,
    ranks=4,
    width=0,
    placement=(),
    device_of_rank=(),
    step=Step(0),
    epoch=Epoch(0),
    submitted_at=at(3600),
    waiting="it needs 4 devices, 2 are free",
)


def rows():
    part = JobOnNode(job=JobId(view().id), epoch=Epoch(2), step=Step(151))
    return tuple(in_order([row_of_view(WAITING), row_of_view(view(), [node(NODE_1, part)])]))


def test_list_of_jobs():
    assert shown(ps.jobs_table(Listing(rows(), True), NOW)) == [
        "JOB              TIER   PHASE    RANKS  STEP  EPOCH  NODES   AGE  WAITING FOR",
        "char-gpt-x7k2mn  basic  running      2   151      2  node-1   2h",
        "digits-abc234    basic  queued       4                       65m  it needs 4 devices, 2 are free",
    ]


def test_list_of_jobs_on_a_narrow_screen():
    assert shown(ps.jobs_table(Listing(rows(), True), NOW), 92) == [
        "JOB              TIER   PHASE    RANKS  STEP  EPOCH  NODES   AGE  WAITING FOR",
        "char-gpt-x7k2mn  basic  running      2   151      2  node-1   2h",
        "digits-abc234    basic  queued       4                       65m  it needs 4 devices, 2 are",
        "                                                                  free",
    ]


def test_a_job_whose_id_does_not_tell_its_name():
    other = row_of_view(view("nightly", name="char GPT"))
    text = shown(ps.jobs_table(Listing((other, *rows()), True), NOW))
    assert text[0].split()[:2] == ["JOB", "NAME"]
    assert text[1].startswith("nightly          char GPT  basic")


def test_a_narrower_job_and_one_that_nobody_answers_for():
    spliced = row_of_view(view(width=1, placement=(device(NODE_1, 0),), device_of_rank=(0, 0)))
    silent = replace(row_of_view(view(held=True, phase=JobPhase.SUSPENDED)), source="visibility")
    text = "\n".join(shown(ps.jobs_table(Listing((spliced, silent), True), NOW)))
    assert "2 on 1" in text
    assert "suspended (held) ?" in text
    assert Listing((spliced, silent), True).unanswered == 1


def test_a_job_that_starts_its_own_ranks():
    tree = view(pack="node", ranks=1)
    assert "own on 2" in "\n".join(shown(ps.jobs_table(Listing((row_of_view(tree),), True), NOW)))
    assert show.sentences(tree, ())[0].startswith(f"Job {tree.id} (basic, its own ranks) is running")
    seen = Overview("local", (node(NODE_1),), {"node-1": 1.0}, (tree,), None, NOW)
    assert f"{tree.id} (its own ranks)" in "\n".join(shown(nodes.nodes_table(seen)))


def test_fields_of_a_list():
    assert row_of_view(view()).to_json(NOW) == {
        "id": "char-gpt-x7k2mn",
        "name": "char-gpt",
        "tenant": "default",
        "tier": "basic",
        "phase": "running",
        "held": False,
        "ranks": 2,
        "width": 2,
        "step": 120,
        "epoch": 2,
        "nodes": ("node-1",),
        "submitted_at": START,
        "waiting": "",
        "source": "workflow",
        "pack": "rank",
        "age_s": 7500.0,
    }


@pytest.mark.parametrize(
    ("parts", "step"),
    [
        ([], None),
        ([("node-1", 2, 130)], 130),
        ([("node-1", 2, 130), ("node-2", 2, 128)], 128),  # the slowest rank counts
        ([("node-1", 1, 900), ("node-2", 2, 128)], 128),  # an epoch that does not count any more
        ([("node-1", 1, 900)], None),
    ],
)
def test_live_steps(parts, step):
    records = [
        node(NODE_1 if name == "node-1" else NODE_2, JobOnNode(job=JobId("j"), epoch=Epoch(epoch), step=Step(at_step)))
        for name, epoch, at_step in parts
    ]
    assert live_step("j", 2, records) == step


def test_visibility_queries():
    assert visibility_query(False, None) == "WorkflowType = 'Job' AND ExecutionStatus = 'Running'"
    assert visibility_query(True, "team-a") == "WorkflowType = 'Job' AND ErgoTenant = 'team-a'"


def test_time_line():
    lines = shown(show.timeline(view().transitions), 150)
    assert lines[0].split() == ["TIME", "(UTC)", "PHASE", "EPOCH", "STEP", "WHERE", "STOPPED", "FOR", "WHY"]
    assert lines[-1] == (
        "2026-11-29 12:02:00  running        2   120  node-1: cpu-0 cpu-1      61.50 s  "
        "restored (waiting 60.00 s, restore 1.50 s)"
    )
    assert "preempted for digits-4" in "\n".join(lines)


def test_fields_of_a_job():
    part = JobOnNode(job=JobId(view().id), epoch=Epoch(2), step=Step(200))
    fields = show.to_json(view(), [node(NODE_1, part)], "RUNNING", "http://ui/x")
    for name in ("id", "phase", "step", "epoch", "placement", "width", "tier", "gpu_fraction", "checkpoints"):
        assert name in fields
    assert fields["step"] == 200
    assert fields["placement"] == ["node-1@1/cpu-0", "node-1@1/cpu-1"]
    assert fields["workflow_status"] == "running"
    assert fields["workflow_url"] == "http://ui/x"


def overview(**ages: float) -> Overview:
    records = (node(NODE_1, JobOnNode(job=JobId(view().id), epoch=Epoch(2), step=Step(5))), node(NODE_2, devices=1))
    return Overview(
        cluster="local",
        nodes=records,
        ages_s={name.replace("_", "-"): age for name, age in ages.items()},
        views=(view(),),
        scheduler=ClusterView("local", "d", 3, 0, 0, "nothing to do"),
        time=NOW,
    )


def test_list_of_nodes():
    seen = overview(node_1=1.2, node_2=30.0)
    assert shown(nodes.nodes_table(seen)) == [
        "NODE    STATE        LEASE  DEVICE  ACCELERATOR  MEMORY  JOB",
        "node-1  alive    1 of 10 s  cpu-0   cpu                  char-gpt-x7k2mn (rank 0)",
        "                            cpu-1   cpu                  char-gpt-x7k2mn (rank 1)",
        "node-2  silent  30 of 10 s  cpu-0   cpu",
    ]


def test_devices_by_type_and_nodes_that_are_cordoned():
    seen = replace(overview(node_1=1.2), cordoned={"node-1": False, "node-2": True})
    assert nodes._head(seen) == "cluster local: 2 nodes; 3 devices of cpu: 2 in use, 0 free, 1 on cordoned nodes"
    assert shown(nodes.nodes_table(seen))[1].startswith("node-1  alive, cordoned")
    fields = seen.to_json()
    assert fields["types"] == [{"accelerator": "cpu", "devices": 3, "held": 2, "free": 0, "cordoned": 1}]
    assert [node["order"] for node in fields["nodes"]] == ["cordoned", "draining"]


def test_fields_of_the_fleet():
    fields = overview(node_1=1.26).to_json()
    assert fields["cluster"] == "local"
    assert fields["scheduler"] == {"tick": 3, "summary": "nothing to do", "waiting_batches": 0, "undelivered": 0}
    first, second = fields["nodes"]
    assert (first["name"], first["incarnation"], first["state"]) == ("node-1", 1, "alive")
    assert (first["lease_s"], first["lease_age_s"], second["lease_age_s"]) == (10.0, 1.3, None)
    assert first["devices"][0] == {
        "id": "node-1@1/cpu-0",
        "accelerator": "cpu",
        "memory_bytes": 0,
        "jobs": [{"id": "char-gpt-x7k2mn", "ranks": [0]}],
    }
    assert first["jobs"] == [{"id": "char-gpt-x7k2mn", "epoch": 2, "step": 5, "device_ms": 0}]
    assert second["devices"][0]["jobs"] == []


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"phase": JobPhase.COMPLETED, "exit_code": 0}, 0),
        ({"phase": JobPhase.COMPLETED}, 0),
        ({"phase": JobPhase.FAILED, "exit_code": 3}, 3),
        ({"phase": JobPhase.FAILED, "exit_code": None}, 1),
        ({"phase": JobPhase.FAILED, "exit_code": 0}, 1),
        ({"phase": JobPhase.FAILED, "exit_code": 256}, 1),
        ({"phase": JobPhase.CANCELLED, "exit_code": None}, 130),
    ],
)
def test_exit_codes_of_a_job(fields, code):
    assert exit_code(view(**fields)) == code


def test_lines_of_a_life():
    changes = view().transitions
    assert line(changes[1]) == "starting on node-1: cpu-0 cpu-1: placed"
    assert "stopped for 61.50 s (waiting 60.00 s, restore 1.50 s)" in line(changes[-1])


def test_parts_of_a_downtime():
    assert (
        show.parts({"node.read": 900.0, "restore": 1000.0, "head": 9.0, "write": 20.0})
        == " (restore 1.00 s, write 20 ms)"
    )
    assert show.parts({"head": 1.0}) == show.parts(None) == ""


def test_every_change_is_told_once():
    changes = view().transitions
    assert news(changes, None) == changes
    assert news(changes, changes[2]) == changes[3:]
    assert news(changes, changes[-1]) == ()
    # The view has forgotten what was told last: what is newer is told, and nothing twice.
    assert news(changes[3:], changes[2]) == changes[3:]


def test_lines_of_logs():
    several = Lines(many=True)
    assert several.add(0, b"a\nb") == b"[rank0] a\n"
    assert several.add(1, b"x") == b""
    assert several.add(0, b"c\n\n") == b"[rank0] bc\n[rank0] \n"
    assert several.flush() == b"[rank1] x\n"
    assert several.flush() == b""
    one = Lines(many=False)
    assert one.add(0, b"a\nb\r 3%") == b"a\nb\r 3%"  # a bar of progress is seen while it grows
    assert one.add(0, b"") == b""
    assert one.flush() == b"\n"
    assert one.add(0, b"c\n") + one.flush() == b"c\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.9, "59 s"), (60, "1 min"), (3725, "1 h 2 min"), (90_000, "1 d 1 h"), (-3, "0 s")],
)
def test_durations(seconds, text):
    assert words.duration(seconds) == text

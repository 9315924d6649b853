from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from model.ids import DeviceId, Epoch, JobId
from model.job_spec import parse_job_spec
from model.placement import Placement
from proxy_runtime.node.ledger import Epochs, Ledger, PartRecord

JOB = JobId("job-1")


def record(epoch: int = 1) -> PartRecord:
    placement = Placement(Epoch(epoch), (DeviceId.parse("n@1/cpu-0"),), (0,))
    spec = parse_job_spec({"apiVersion": "ergosphere/v1", "argv": ["python", "x.py"]})
    return PartRecord(JOB, Epoch(epoch), spec, placement, "b" * 32, ("python",), "/run/ergo/job-1.d", {"A": "b"})


def test_an_agent_that_starts_again_finds_its_parts(tmp_path: Path) -> None:
    Ledger(tmp_path).put(record(1))
    started = replace(record(2), started=True)
    Ledger(tmp_path).put(started)
    assert Ledger(tmp_path).parts() == [record(1), started]
    Ledger(tmp_path).drop(JOB, Epoch(1))
    assert Ledger(tmp_path).parts() == [started]


def test_epochs_only_grow_and_are_remembered(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    assert ledger.epochs(JOB) == Epochs()
    ledger.note_seen(JOB, Epoch(5))
    ledger.note_seen(JOB, Epoch(3))
    ledger.note_stopped(JOB, Epoch(4))
    ledger.note_stopped(JOB, Epoch(2))
    assert Ledger(tmp_path).epochs(JOB) == Epochs(Epoch(5), Epoch(4))
    ledger.note_stopped(JOB, Epoch(7))
    assert Ledger(tmp_path).epochs(JOB) == Epochs(Epoch(7), Epoch(7))


def test_an_epoch_that_never_came_to_count_is_void_and_those_before_it_go_on(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.note_stopped(JOB, Epoch(1))
    ledger.note_void(JOB, Epoch(3))
    ledger.note_void(JOB, Epoch(4))
    known = Ledger(tmp_path).epochs(JOB)
    assert [known.over(Epoch(epoch)) for epoch in range(1, 6)] == [True, False, True, True, False]
    ledger.note_stopped(JOB, Epoch(3))
    assert Ledger(tmp_path).epochs(JOB) == Epochs(Epoch(3), Epoch(3), (Epoch(4),))


def test_a_half_written_record_is_no_part(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.put(record())
    (tmp_path / "parts" / "other-e1.json").write_text('{"job": ')
    assert ledger.parts() == [record()]


def test_another_incarnation_knows_nothing_of_stopped_epochs(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.note_stopped(JOB, Epoch(4))
    ledger.forget_epochs()
    assert Ledger(tmp_path).epochs(JOB) == ledger.epochs(JOB) == Epochs()

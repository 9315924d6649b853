"""A job that is resized at random has every number of the untouched one; see `tests/elastic/proof.py`."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from proxy_runtime.shim.spec import CutReport
from tests.elastic.kinds import KINDS, QUICK
from tests.elastic.proof import COMPARED, Finding, Resize, planned, prove, sharing_in_order
from tests.end_to_end.harness import Script


def proved(name: str, tmp_path: Path, resizes: int = 0) -> Finding:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"{name}: seed {seed}")
    finding = prove(KINDS[name], seed, tmp_path / name, resizes)
    assert finding.equal, (finding.problems, finding.different)
    assert [cut.outcome for cut in finding.cuts] == ["moved"] * len(finding.plan)
    return finding


@pytest.mark.parametrize("name", QUICK)
def test_resized_at_random_moments(name: str, tmp_path: Path) -> None:
    assert proved(name, tmp_path).sharing["shared"] > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in KINDS if name not in QUICK])
def test_every_kind_resized_at_random_moments(name: str, tmp_path: Path) -> None:
    proved(name, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [kind.name for kind in KINDS.values() if kind.shares_less_than])
def test_ranks_that_diverge_share_less(name: str, tmp_path: Path) -> None:
    names = (name, KINDS[name].shares_less_than)
    assert not sharing_in_order({each: proved(each, tmp_path) for each in names})


def measured(name: str, shared: int, *, steps: tuple[int, int] = (38, 50), timeouts: int = 0) -> Finding:
    """Of a kind whose ranks have shared so many of 1,000 calls where that is measured."""
    found = Finding(KINDS[name], 0, [Resize(38, 1, False, False), Resize(50, 2, False, False)])
    counted = {"shared": shared, "executed": 1000 - shared, "timeouts": timeouts}
    found.cuts = [CutReport(steps=[steps[0]] * 2), CutReport(steps=[steps[1]] * 2, sharing=counted)]
    return found


@pytest.mark.parametrize(
    ("shared", "how", "says"),
    [
        (117, {}, ""),
        (118, {}, ": its ranks diverge, and 11.80% of the calls were shared, of clipping_2 11.80%."),
        (9, {"steps": (38, 49)}, " cannot be compared with clipping_2: it was not cut at the end of steps 38, 50."),
        (9, {"timeouts": 1}, " cannot be compared with clipping_2: 1 time limit of waiting fired, and "),
    ],
)
def test_ranks_that_diverge_and_share_as_much_are_found(shared: int, how: dict[str, Any], says: str) -> None:
    findings = [measured("clipping_2", 118), measured("own_work", shared, **how)]
    found = sharing_in_order({each.kind.name: each for each in findings})
    assert len(found) == bool(says)
    assert not says or found[0].startswith(f"own_work{says}")


def test_a_plan_visits_every_width_and_ends_at_the_first() -> None:
    for seed in range(20):
        for kind in KINDS.values():
            plan, world = planned(kind, seed), kind.script.ranks
            assert {each.width for each in plan} == {width for width in range(1, world + 1) if world % width == 0}
            assert plan[-1].width == world
            assert not kind.steps or plan[-1].step < kind.steps - 4
            assert [each.step for each in plan] == sorted({each.step for each in plan})
            assert kind.name not in COMPARED or [each.width for each in plan[-2:]] == [1, world]


@pytest.mark.slow
def test_what_differs_is_found(tmp_path: Path) -> None:
    """A script whose numbers are not the same in two runs, for reasons of its own."""
    script = tmp_path / "drifts.py"
    script.write_text(
        "import os, torch\n"
        "model = torch.nn.Linear(4, 4).cuda()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "drift = int.from_bytes(os.urandom(2), 'big')\n"
        "for step in range(60):\n"
        "    loss = model(torch.full((2, 4), 1.0 + drift).cuda()).sum()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
    )
    kind = KINDS[QUICK[0]]
    kind = dataclasses.replace(kind, script=Script(script, ranks=2), shows="what it never prints")
    finding = prove(kind, 1, tmp_path / "runs")
    assert finding.problems == ["not every rank has shown 'what it never prints'"] * 2
    assert {name.split("/")[1] for name in finding.different} >= {"losses", "weights"}

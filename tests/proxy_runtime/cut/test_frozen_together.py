"""Ranks that are frozen together: what is told is why the first one could not be, not that another one could not."""

from __future__ import annotations

import pytest

from proxy_runtime.cut.cutter import FrozenTogether
from proxy_runtime.shim.spec import RunError
from proxy_runtime.shim.workers import in_parallel


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_the_first_cause_is_kept_whoever_it_is(failing: int) -> None:
    together = FrozenTogether(3, 30.0, lambda: None)

    def rank(number: int) -> None:
        try:
            if number == failing:
                raise RunError("the disk with the process images is full.", code="criu.disk-full")
            together.wait()
        except BaseException as error:
            together.abort(error)
            raise

    with pytest.raises(RunError):
        in_parallel([lambda number=number: rank(number) for number in range(3)])
    assert isinstance(together.cause, RunError) and together.cause.code == "criu.disk-full"


def test_what_the_action_raises_is_the_cause() -> None:
    def action() -> None:
        raise RunError("the volume cannot be read.", code="cut.volume")

    together = FrozenTogether(2, 30.0, action)

    def rank() -> None:
        try:
            together.wait()
        except BaseException as error:
            together.abort(error)
            raise

    with pytest.raises(RunError):
        in_parallel([rank, rank])
    assert isinstance(together.cause, RunError) and together.cause.code == "cut.volume"


def test_with_nothing_but_time_to_blame_it_says_so() -> None:
    together = FrozenTogether(2, 0.05, lambda: None)
    with pytest.raises(RunError, match="another rank could not be frozen"):
        together.wait()
    assert together.cause is None

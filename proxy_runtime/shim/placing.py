"""Which device of this machine a rank gets when a job goes on at another width."""

from __future__ import annotations

from collections.abc import Sequence

from model.errors import ModelError
from model.manifest import RankState
from model.splicing import check_fit, parallelism, placed
from proxy_runtime.shim.spec import RunError, RunSpec, contiguous_placement


def place(spec: RunSpec, ranks: Sequence[RankState], width: int, before: Sequence[int]) -> tuple[int, ...]:
    """For each rank the index of its device, by what a cut has found, as a fleet places it.

    Where the devices cannot have as many ranks each (`ergo local cut --devices`), ranks are taken in their order.

    Args:
        spec: the job.
        ranks: all of them, with communicators, sizes and sketches.
        width: number of devices.
        before: as it was at the cut; it stays so where the width does.

    Raises:
        RunError: ``run.bad-width``: replicas would be torn apart, or the ranks of a device would not fit it.
    """
    if width == len(set(before)):
        return tuple(before)
    if spec.pack == "node" or spec.world_size % width:
        return contiguous_placement(spec.world_size, width)
    found = parallelism(ranks)
    try:
        device_of_rank = placed(found, width)
        check_fit(found, device_of_rank, spec.device_memory)
    except ModelError as error:
        raise RunError(str(error), code="run.bad-width") from error
    return device_of_rank

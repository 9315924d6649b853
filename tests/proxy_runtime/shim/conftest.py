"""A fleet that leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from proxy_runtime.shim import remains
from tests.proxy_runtime.shim.fleet import JOBS, Fleet


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    """Makes fleets of two nodes; at the end none of their processes may be left."""
    made: list[Fleet] = []

    def make(script: str, *arguments: str, **more: object) -> Fleet:
        command = (str(JOBS / script), *arguments)
        one = Fleet(tmp_path / f"fleet-{len(made)}", command, **more)  # type: ignore[arg-type]
        made.append(one)
        return one

    yield make
    for one in made:
        layouts = [part.layout for part in one.all_parts]
        one.end()
        for layout in layouts:
            assert not remains.processes(layout)
            assert not layout.root.exists()

"""Main of a shim: `python -m proxy_runtime.shim RUN_DIRECTORY`."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import orjson

from model.codec import from_json
from proxy_runtime import build
from proxy_runtime.process import criu_setup
from proxy_runtime.shim.layout import RunLayout
from proxy_runtime.shim.node_job import NodeJob
from proxy_runtime.shim.part import Limits
from proxy_runtime.shim.parts.job import PartJob
from proxy_runtime.shim.parts.server import PartShim
from proxy_runtime.shim.server import Shim
from proxy_runtime.shim.spec import RunSpec


def run(root: Path) -> None:
    """Serves the job, or the part of one, whose specification is in `run.json` of its run directory."""
    data = orjson.loads((root / "run.json").read_bytes())
    spec = RunSpec.from_json(data["spec"])
    layout = RunLayout(root, spec.job_id)
    made = build.load(Path(data["build"]))

    @functools.cache
    def tool() -> criu_setup.Criu:
        found = criu_setup.find()
        criu_setup.self_test(found, made.init_binary)
        return found

    if spec.part is not None:
        limits = from_json(Limits, data["limits"])
        PartShim(layout, PartJob(spec, layout, made, tool, limits)).serve()
        os._exit(0)  # nothing that a thread still waits for may keep an ended part alive
    shim = Shim(spec, layout, NodeJob(spec, layout, made, tool))
    if not spec.linger:
        shim.end_with(int(data["owner"]))
    shim.serve()


if __name__ == "__main__":
    run(Path(sys.argv[1]))

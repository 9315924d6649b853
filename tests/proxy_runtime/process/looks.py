"""What tests see of a container."""

from __future__ import annotations

from dataclasses import replace

from proxy_runtime.process import proc


def numbers(lab) -> list[int]:
    return [int(line) for line in lab.lines()]


def unbroken(lab) -> bool:
    """It has counted on, from 0."""
    found = numbers(lab)  # once: it goes on meanwhile
    return found == list(range(len(found)))


def states(container) -> set[str]:
    return {proc.status_field(pid, "State")[:1] for pid in container.processes()}


def rank_running(lab, code: str):
    """A container whose rank runs a piece of Python that then says `up` and sleeps."""
    spec = lab.spec("count")
    code += "\nimport time; print('up', flush=True); time.sleep(1000)"
    container = lab.launch(replace(spec, argv=(spec.argv[0], "-c", code)))
    lab.wait_lines(1)
    return container

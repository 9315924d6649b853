"""The process that a job's device proxies are forked from."""

from __future__ import annotations

from proxy_runtime.build import Build
from proxy_runtime.device.client import DeviceProxyError, Zygote
from proxy_runtime.shim.generation import Generation
from proxy_runtime.shim.layout import RunLayout
from proxy_runtime.shim.spec import RunError, RunSpec


def start_zygote(spec: RunSpec, build: Build, layout: RunLayout) -> Zygote:
    """Starts it in the job's interpreter: the device computes with the torch that the ranks see."""
    return Zygote.start(build, spec.device_kind, log=layout.root / "zygote.log", python=spec.python or None)


def fork_proxies(generation: Generation, zygote: Zygote, layout: RunLayout, deadline_s: float = 60.0) -> None:
    """Forks a generation's proxies; an error of the zygote comes with its last words."""
    try:
        generation.fork_proxies(zygote, deadline_s)
    except DeviceProxyError as error:
        words = (layout.root / "zygote.log").read_text(errors="replace").strip().splitlines()
        if error.code == "device-proxy.start" and words:
            raise RunError(f"{error.message} Its last words: {words[-1]}", code=error.code) from error
        raise

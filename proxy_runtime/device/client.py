"""The owner's side of device proxies: the zygote that makes them, a client for each, and their fabric."""

from __future__ import annotations

from proxy_runtime.device.connection import DEFAULT_DEADLINE_S, DeviceProxyClient, ProxyInfo
from proxy_runtime.device.errors import DeviceProxyError
from proxy_runtime.device.launcher import NativeBuild, Zygote
from proxy_runtime.device.wiring import Transport, connect_fabric

__all__ = [
    "DEFAULT_DEADLINE_S",
    "DeviceProxyClient",
    "DeviceProxyError",
    "NativeBuild",
    "ProxyInfo",
    "Transport",
    "Zygote",
    "connect_fabric",
]

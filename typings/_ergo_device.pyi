"""The device side's native module, built on the machine that runs it (`proxy_runtime/device/native/`)."""

from typing import Any

def __getattr__(name: str) -> Any: ...

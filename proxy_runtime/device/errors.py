"""The error of the device side, as its owner sees it."""

from __future__ import annotations

from proxy_runtime.errors import ErgoError


class DeviceProxyError(ErgoError):
    """A device proxy or its zygote failed, or refused a request.

    Codes: `device-proxy.gone` (it has ended), `.deadline`, `.build`, `.protocol`, `.order` (not now),
    `.rank`, `.ring`, `.device-kind`, `.fabric`, `.targets`, `.dump`, `.meta`, `.storages`, `.request`,
    `.internal`, `.setting`, `.start`, `.torch`, `.fork`, `.zygote-threads`.
    """

    code = "device-proxy"


def sentence(text: str) -> str:
    """`text` with a capital and a full stop, as errors are shown."""
    text = text.strip()
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else text + "."

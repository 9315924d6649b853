"""Which proxies listen for which, and on what."""

from __future__ import annotations

import socket

import pytest

from proxy_runtime.device.errors import DeviceProxyError
from proxy_runtime.device.wiring import address_of, connect_fabric, listening_pairs, reserve


def test_the_lower_device_listens_for_those_of_other_nodes() -> None:
    placement = (0, 0, 1, 2, 3)
    assert listening_pairs((0, 2), placement) == [(0, 1), (0, 3), (2, 3)]
    assert listening_pairs((1, 3), placement) == [(1, 2)]
    assert listening_pairs((0, 1, 2, 3), placement) == []


def test_a_reserved_port_is_given_to_nobody_else_but_may_be_listened_on() -> None:
    with reserve("127.0.0.1") as held, socket.socket() as other, socket.socket() as proxy:
        with pytest.raises(OSError):
            other.bind(address_of(held))
        proxy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        proxy.bind(address_of(held))
        proxy.listen()
        with socket.create_connection(address_of(held), timeout=5):
            proxy.accept()[0].close()


def test_an_address_of_another_machine_is_refused_in_one_sentence() -> None:
    with pytest.raises(DeviceProxyError, match=r"cannot listen on 192\.0\.2\.1") as caught:
        reserve("192.0.2.1")
    assert caught.value.code == "device-proxy.address"


def test_a_pair_without_an_address_is_named() -> None:
    with pytest.raises(DeviceProxyError, match="device 0 listens for device 1"):
        connect_fabric({1: None}, (0, 1), remote={(0, 2): ("127.0.0.1", 1)})  # type: ignore[dict-item]

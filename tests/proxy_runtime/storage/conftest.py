"""Fixtures of the fleet store's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from proxy_runtime.checkpoint import Store
from proxy_runtime.storage import Bucket, FleetStore
from proxy_runtime.storage.peer import PeerServer
from tests.proxy_runtime.storage.builders import SECRET


@pytest.fixture
def fleet(tmp_path: Path) -> FleetStore:
    """A fleet's store in a directory."""
    return FleetStore(Bucket.open(f"file://{tmp_path}/bucket"), SECRET)


@pytest.fixture
def node_store(tmp_path: Path, fleet: FleetStore) -> Callable[[str], Store]:
    """Chunk stores of nodes, by name."""
    return lambda name: fleet.node_store(tmp_path / name, "acme")


@pytest.fixture
def serve(fleet: FleetStore) -> Iterator[Callable[..., str]]:
    """Serves a node's store; gives its address."""
    servers: list[PeerServer] = []

    def start(store: Store, token: str | None = None) -> str:
        servers.append(PeerServer(token or fleet.peer_token, lambda _tenant: store))
        return servers[-1].start()

    yield start
    for server in servers:
        server.stop()

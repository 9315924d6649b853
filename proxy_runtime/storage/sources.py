"""Where packs come from: the bucket, or other nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

import httpx
from pydantic import ValidationError

from model.ids import NodeId
from model.manifest import Manifest
from proxy_runtime.storage import documents
from proxy_runtime.storage.blobs import Bucket
from proxy_runtime.storage.errors import PERMISSION, StorageError, damaged
from proxy_runtime.storage.fleet import FleetStore

_TIMEOUT = httpx.Timeout(15.0, connect=3.0)
_BLOCK = 1 << 20


class Source(Protocol):
    """Something that has packs.

    Attributes:
        name: for errors.
    """

    name: str

    def pack(self, tenant: str, pack: str, start: int, end: int) -> Iterator[bytes | memoryview]:
        """Bytes of a pack from ``start`` to ``end``, which is its length.

        Raises:
            FileNotFoundError: it is not there.
            StorageError: the source does not answer, or refuses.
        """
        ...

    def manifest(self, tenant: str, job: str, checkpoint: str) -> Manifest | None:
        """A checkpoint's manifest, not yet proved; None where it is not there."""
        ...


class BucketSource:
    """The fleet's bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self.name = bucket.url
        self._bucket = bucket

    def pack(self, tenant: str, pack: str, start: int, end: int) -> Iterator[bytes | memoryview]:
        return self._bucket.stream(documents.pack_key(tenant, pack), start, end - start)

    def manifest(self, tenant: str, job: str, checkpoint: str) -> Manifest | None:
        key = documents.manifest_key(tenant, checkpoint)
        document = documents.read(self._bucket, key, documents.CheckpointDocument)
        return None if document is None else document.manifest


class PeerSource:
    """Another node.

    Args:
        name: of the node, for errors.
        address: ``host:port`` of its peer.
        token: of the fleet.
    """

    def __init__(self, name: str, address: str, token: str) -> None:
        self.name = f"node {name}"
        self._client = httpx.Client(
            base_url=f"http://{address}",
            headers={"authorization": f"Bearer {token}"},
            timeout=_TIMEOUT,
            trust_env=False,  # nodes are reached directly, whatever proxy the environment names
        )

    def close(self) -> None:
        """Closes its connections."""
        self._client.close()

    def pack(self, tenant: str, pack: str, start: int, end: int) -> Iterator[bytes | memoryview]:
        headers = {"range": f"bytes={start}-{end - 1}"}
        with self._errors(), self._client.stream("GET", f"/v1/packs/{tenant}/{pack}", headers=headers) as response:
            self._check(response)
            if start and response.status_code != httpx.codes.PARTIAL_CONTENT:
                raise damaged(f"The answer of {self.name}", "it ignores ranges")
            yield from response.iter_raw(_BLOCK)

    def manifest(self, tenant: str, job: str, checkpoint: str) -> Manifest | None:
        with self._errors():
            response = self._client.get(f"/v1/manifests/{tenant}/{job}/{checkpoint}")
            try:
                self._check(response)
            except FileNotFoundError:
                return None
            try:
                return Manifest.model_validate_json(response.content)
            except ValidationError as error:
                raise damaged(f"The manifest from {self.name}", error.errors()[0]["msg"]) from None

    def _check(self, response: httpx.Response) -> None:
        if response.status_code == httpx.codes.NOT_FOUND:
            raise FileNotFoundError(str(response.url))
        if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise StorageError(
                f"{self.name} refuses the token of this fleet.",
                code=PERMISSION,
                remedy="Give both nodes the secret of one fleet.",
            )
        if response.status_code not in (httpx.codes.OK, httpx.codes.PARTIAL_CONTENT):
            raise StorageError(f"{self.name} answers {response.status_code}.")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPError as error:
            raise StorageError(
                f"{self.name} does not answer ({error or type(error).__name__}).",
                remedy="Another source is asked, where there is one.",
            ) from error


def resolve(fleet: FleetStore, sources: Iterable[NodeId | Literal["store"]]) -> list[Source]:
    """The sources of a transfer, in their order, the bucket last where it was not named.

    Nodes that have gone, or are there under another incarnation, are left out.
    """
    found: list[Source] = []
    for source in sources:
        if isinstance(source, str):
            found.append(BucketSource(fleet.bucket))
            continue
        record = fleet.node(source.name)
        if record is not None and record.node == source and not record.left and not record.lost:
            found.append(PeerSource(str(source), record.address, fleet.peer_token))
    if not any(isinstance(source, BucketSource) for source in found):
        found.append(BucketSource(fleet.bucket))
    return found

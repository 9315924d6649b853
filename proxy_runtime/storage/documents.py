"""What lies in the bucket beside packs, and where.

tenants/T/packs/ID.pack                as in a node's store
tenants/T/parts/KEY.json               what one node has written of a checkpoint: it keeps its packs
tenants/T/trees/DIGEST.json            the list of files of a volume, as in its packs, to be had without them
tenants/T/manifests/CHECKPOINT.json    a checkpoint
tenants/T/volumes/CHECKPOINT.json      an uploaded directory
tenants/T/condemned.json               packs that are just being removed
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, TypeVar

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from model.ids import CheckpointId, Epoch, JobId
from model.manifest import Manifest, PartRef
from model.runtime import NodeParts
from proxy_runtime.storage.blobs import Bucket
from proxy_runtime.storage.errors import damaged

SWEEP_LIMIT_S = 60.0
"""A sweep removes nothing later than this after it has condemned it; a writer waits a little longer than this."""

PackSize = tuple[str, Annotated[int, Field(ge=0)]]
"""Id of a pack, and its length in bytes."""


class Document(BaseModel):
    """What all documents have."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    version: Literal[1] = 1


class Writer(NamedTuple):
    """Who has written parts: a node for an epoch of a job, and whether their checkpoint is committed."""

    node: str
    job: JobId
    epoch: Epoch
    committed: bool = False

    def __str__(self) -> str:
        return " ".join([self.node, self.job, str(int(self.epoch)), *[_COMMITTED] * self.committed])


_COMMITTED = "committed"


class PartsDocument(Document):
    """What one node has written; ``volume_packs`` are those of ``packs`` that hold its volume, ``tree`` its list.

    ``node`` says who has: a `Writer`, or only the node, where no job has (or an older build).
    """

    format: Literal["ergosphere/parts"] = "ergosphere/parts"
    node: str
    packs: tuple[PackSize, ...]
    volume_packs: tuple[str, ...] = ()
    tree: PartRef | None = None
    stored_bytes: int = 0

    @property
    def writer(self) -> Writer | None:
        """Who has written it, where a job has and that is known."""
        node, *rest = self.node.split(" ")
        if len(rest) not in (2, 3) or not rest[1].isdecimal():
            return None
        return Writer(node, JobId(rest[0]), Epoch(int(rest[1])), rest[2:] == [_COMMITTED])


class Share(Document):
    """The packs of some ranks, those that one node has written."""

    ranks: tuple[int, ...]
    packs: tuple[str, ...]


class CheckpointDocument(Document):
    """A checkpoint in the bucket. Packs of a rank are those of its share; ``volume_packs`` hold the volume."""

    format: Literal["ergosphere/checkpoint"] = "ergosphere/checkpoint"
    manifest: Manifest
    packs: tuple[PackSize, ...]
    shares: tuple[Share, ...] = ()
    volume_packs: tuple[str, ...] = ()

    def needed(self, ranks: tuple[int, ...], *, volume: bool = True) -> list[PackSize]:
        """The packs that hold the parts of some ranks, of all where none is named, and the volume."""
        if not ranks or not self.shares:
            return list(self.packs)
        wanted = {pack for share in self.shares if set(share.ranks) & set(ranks) for pack in share.packs}
        if volume:
            wanted |= set(self.volume_packs)
        return [(pack, size) for pack, size in self.packs if pack in wanted]


class VolumeDocument(Document):
    """An uploaded directory. ``root`` hashes ``volume``."""

    format: Literal["ergosphere/volume"] = "ergosphere/volume"
    root: CheckpointId
    key_id: str
    volume: PartRef
    packs: tuple[PackSize, ...]


class Condemned(Document):
    """What a sweep is just removing."""

    format: Literal["ergosphere/condemned"] = "ergosphere/condemned"
    keys: tuple[str, ...]


D = TypeVar("D", bound=Document)


def pack_key(tenant: str, pack: str) -> str:
    """A pack."""
    return f"tenants/{tenant}/packs/{pack}.pack"


def parts_key(tenant: str, parts: NodeParts) -> str:
    """Where the document of these parts is: named by what they are."""
    refs = [r for rank in parts.ranks for r in (rank.process, rank.device)] + [parts.volume]
    text = str(parts.node) + "".join("/" if ref is None else f"/{ref.digest}" for ref in refs)
    return f"tenants/{tenant}/parts/{blake3(text.encode()).hexdigest()[:40]}.json"


def tree_key(tenant: str, ref: PartRef) -> str:
    """The list of files of a volume."""
    return f"tenants/{tenant}/trees/{ref.digest}.json"


def manifest_key(tenant: str, checkpoint: str) -> str:
    """A checkpoint."""
    return f"tenants/{tenant}/manifests/{checkpoint}.json"


def volume_key(tenant: str, checkpoint: str) -> str:
    """An uploaded directory."""
    return f"tenants/{tenant}/volumes/{checkpoint}.json"


def condemned_key(tenant: str) -> str:
    """Packs that are just being removed."""
    return f"tenants/{tenant}/condemned.json"


def write(bucket: Bucket, key: str, document: Document) -> None:
    """Writes a document, in place of one that is there."""
    bucket.put(key, document.model_dump_json().encode())


def read(bucket: Bucket, key: str, shape: type[D]) -> D | None:
    """Reads a document; None where there is none.

    Raises:
        StorageError: it is damaged.
    """
    data = bucket.get(key)
    if data is None:
        return None
    try:
        return shape.model_validate_json(data)
    except ValidationError as error:
        raise damaged(f"{key} in {bucket.url}", error.errors()[0]["msg"]) from None

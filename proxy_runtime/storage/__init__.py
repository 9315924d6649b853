"""The fleet's store: records by compare-and-swap, checkpoints and volumes, and how they travel between nodes."""

from proxy_runtime.storage.blobs import Bucket
from proxy_runtime.storage.errors import Fenced, StorageError
from proxy_runtime.storage.fleet import FleetStore

__all__ = ["Bucket", "Fenced", "FleetStore", "StorageError"]

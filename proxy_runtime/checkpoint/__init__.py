"""The checkpoint store: chunks by content in packs, a Merkle manifest for each checkpoint, one HEAD for each job.

store = Store.open(directory)
with store.begin("job", epoch=3) as writer:
    writer.add_tree(Part.process(0), images)
    writer.add_bytes(Part.device(0), "meta", meta)
    writer.add_file(Part.device(0), "storages", storages)
    writer.add_tree(Part.volume(), upper_copy)
    checkpoint = writer.commit(header)
store.read(checkpoint).restore_part(Part.process(0), empty_directory)
"""

from proxy_runtime.checkpoint.errors import CheckpointError, FencedError
from proxy_runtime.checkpoint.gc import Collected
from proxy_runtime.checkpoint.parts import Part
from proxy_runtime.checkpoint.reader import CheckpointReader, Verified
from proxy_runtime.checkpoint.store import CheckpointSummary, Store, open_checkpoint
from proxy_runtime.checkpoint.writer import CheckpointWriter, WrittenParts

__all__ = [
    "CheckpointError",
    "CheckpointReader",
    "CheckpointSummary",
    "CheckpointWriter",
    "Collected",
    "FencedError",
    "Part",
    "Store",
    "Verified",
    "WrittenParts",
    "open_checkpoint",
]

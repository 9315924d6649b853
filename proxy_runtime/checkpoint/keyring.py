"""The keys of a store's tenants: one file of mode 0600 beside the packs.

Without it nothing in the store can be proved, so it is durable before the first chunk is written.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from proxy_runtime.checkpoint import documents, merkle
from proxy_runtime.checkpoint.errors import damaged
from proxy_runtime.checkpoint.files import Files

NAME = "keyring"
FORMAT = "ergosphere/keyring"
VERSION = 1


def load(path: Path) -> dict[str, bytes]:
    """Reads the keys by tenant.

    Raises:
        CheckpointError: the file is missing, damaged, or of a newer format.
    """
    document = documents.read(path, "the keyring", FORMAT, VERSION, where="every checkpoint of this store")
    try:
        keys = {str(tenant): bytes.fromhex(key) for tenant, key in document["tenants"].items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise damaged(f"the keyring {path}", "a list of tenants and keys", "something else") from None
    if path.stat().st_mode & 0o077:
        os.chmod(path, 0o600)  # copied by something that did not keep the mode
    return keys


def add(path: Path, keys: dict[str, bytes], tenant: str, files: Files, *, key: bytes | None = None) -> dict[str, bytes]:
    """Gives a tenant a key, a fresh random one where none is given, and writes the keyring."""
    keys = {**keys, tenant: key or secrets.token_bytes(merkle.HASH_BYTES)}
    tenants = {str(name): key.hex() for name, key in keys.items()}
    documents.write(path, {"format": FORMAT, "version": VERSION, "tenants": tenants}, files)
    return keys

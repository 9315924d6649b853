"""Small files of a store (format, keyring, HEAD, manifests): a line of JSON and a line with its checksum."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import orjson

from proxy_runtime.checkpoint import merkle
from proxy_runtime.checkpoint.errors import NOT_A_CHECKPOINT, CheckpointError, damaged, missing, newer_format
from proxy_runtime.checkpoint.files import Files


def write(path: Path, document: dict[str, Any], files: Files) -> None:
    """Publishes a document that has ``format`` and ``version``."""
    body = orjson.dumps(document, option=orjson.OPT_SORT_KEYS)
    data = body + b"\n" + merkle.plain(body).encode() + b"\n"
    files.publish(path, data, path.with_name(f".{path.name}.{secrets.token_hex(8)}"))


def read(path: Path, name: str, kind: str, version: int, *, where: str = "") -> dict[str, Any]:
    """Reads a document back.

    Args:
        path: the file.
        name: what the file is, for errors, e.g. ``the manifest``.
        kind: the format it must have.
        version: the highest version known.
        where: what needs the file, for errors.

    Raises:
        CheckpointError: it is missing, damaged, of another format or of a newer version.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise missing(f"{name} {path}", where=where) from None
    except OSError as error:
        raise CheckpointError(f"Could not read {name} {path}: {error.strerror}.") from error
    body, _, rest = data.partition(b"\n")
    if rest != merkle.plain(body).encode() + b"\n":
        raise damaged(f"{name} {path}", f"of checksum {rest[:32]!r}", merkle.plain(body))
    document = orjson.loads(body)
    if not isinstance(document, dict) or document.get("format") != kind:
        raise CheckpointError(f"{path} is not {name} of a checkpoint.", code=NOT_A_CHECKPOINT)
    found = document.get("version")
    if not isinstance(found, int) or found > version:
        raise newer_format(f"{name[0].upper()}{name[1:]} {path}", found, version)
    return document

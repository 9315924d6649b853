"""Job directories: uploaded at submission, brought to nodes, and read back from checkpoints."""

from __future__ import annotations

import base64
import os
import secrets
import shutil
import stat
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

import structlog
from pathspec import GitIgnoreSpec

from model.ids import CheckpointId, Epoch, JobId, NodeId
from model.manifest import Manifest, PartRef, Tree, TreeEntry, encode_path
from model.runtime import NodeParts
from proxy_runtime.checkpoint import Part, Store, volume
from proxy_runtime.checkpoint.merkle import CHUNK_REF
from proxy_runtime.checkpoint.parts import node_of
from proxy_runtime.storage import documents
from proxy_runtime.storage.checkpoints import fetch_tree, push
from proxy_runtime.storage.documents import CheckpointDocument, PackSize, VolumeDocument
from proxy_runtime.storage.errors import StorageError, from_os_error, missing
from proxy_runtime.storage.fleet import FleetStore
from proxy_runtime.storage.remote import RemotePacks
from proxy_runtime.storage.transfers import Progress
from proxy_runtime.storage.volume_merge import merge

IGNORE_FILE = ".ergoignore"
ALWAYS_IGNORED = (".git/", "__pycache__/", ".venv/")
LIMIT_BYTES = 1 << 30
TOO_LARGE = "storage.too-large"

_log = structlog.stdlib.get_logger(__name__)


def upload_directory(
    fleet: FleetStore,
    tenant: str,
    path: Path,
    *,
    limit_bytes: int = LIMIT_BYTES,
    progress: Progress | None = None,
) -> CheckpointId:
    """Puts a directory into the bucket, for jobs to be started in. The same directory has the same id.

    Left out are what ``.ergoignore`` names (as in ``.gitignore``), ``.git``, ``__pycache__`` and ``.venv`` unless it
    names them with ``!``, sockets and devices.

    Args:
        fleet: the fleet's store.
        tenant: whose it is.
        path: the directory.
        limit_bytes: how large it may be.
        progress: told of bytes.

    Raises:
        StorageError: it is too large (``storage.too-large``), cannot be read, or the store does not take it.
    """
    root = path.absolute()
    if not root.is_dir():
        raise StorageError(f"{path} is not a directory.", code="storage.no-directory", remedy="Name the job directory.")
    try:
        nodes = tuple(_walk(root))
    except OSError as error:
        raise from_os_error(error, "read the job directory", os.fsdecode(error.filename or root)) from error
    _check_size(root, nodes, limit_bytes)
    with tempfile.TemporaryDirectory(prefix="ergo-upload-") as scratch:
        store = fleet.node_store(Path(scratch) / "store", tenant)
        with store.begin("upload", 0, expected_bytes=sum(node.size for node in nodes)) as writer:
            writer.add_nodes(Part.volume(), volume.VolumeTree(root, nodes))
            written = writer.finish_parts()
        ref = written.refs[Part.volume()]
        hasher = fleet.hasher(tenant)
        checkpoint = CheckpointId("ck-" + hasher.node("volume", ref.digest.encode()).hex()[:40])
        sizes = tuple((pack, store.exchange.path(pack).stat().st_size) for pack in written.packs)
        document = VolumeDocument(root=checkpoint, key_id=hasher.key_id, volume=ref, packs=sizes)
        key = documents.volume_key(tenant, checkpoint)
        if fleet.bucket.size(key) is None:
            # As parts first: they keep what they name until the volume does, which is there only when it is whole.
            push(fleet, store, NodeParts(NodeId("upload", 1), (), (), ref), written.packs, progress=progress)
            documents.write(fleet.bucket, key, document)
    return checkpoint


def materialize(
    fleet: FleetStore, tenant: str, checkpoint: str, dest: Path, *, progress: Progress | None = None
) -> Path:
    """Makes an uploaded directory, or the volume of a checkpoint, on this machine: whole or not at all, and once.

    Args:
        fleet: the fleet's store.
        tenant: whose it is.
        checkpoint: what `upload_directory` has returned, or a checkpoint's id.
        dest: a directory that is missing; where it is there, nothing is done.
        progress: told of bytes.

    Raises:
        StorageError: it is not in the bucket, or the disk is full.
        CheckpointError: it is damaged.
    """
    if dest.is_dir():
        return dest
    ref, packs = _volume_of(fleet, tenant, checkpoint)
    entries = fetch_tree(fleet, tenant, ref).entries
    fresh = dest.with_name(f".{dest.name}.{secrets.token_hex(6)}")
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        _write_entries(RemotePacks(fleet.bucket, tenant, fleet.hasher(tenant), packs), entries, fresh, progress)
        try:
            fresh.rename(dest)
        except OSError:
            if not dest.is_dir():  # somebody else was faster
                raise
    except OSError as error:
        raise from_os_error(error, "bring the job directory", os.fsdecode(error.filename or dest)) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return dest


def _write_entries(
    packs: RemotePacks, entries: Sequence[TreeEntry], dest: Path, progress: Progress | None = None
) -> None:
    """Makes the objects of a tree in ``dest``, an empty or missing directory."""
    nodes = [node_of(entry) for entry in entries]
    volume.create(nodes, dest)
    files = [(e, n) for e, n in zip(entries, nodes, strict=True) if e.kind == "file"]
    packs.fill(((dest / os.fsdecode(node.path), entry) for entry, node in files), progress)
    volume.finish(nodes, dest)


def join_volumes(
    fleet: FleetStore, store: Store, job: str, epoch: int, base: Manifest | Tree | None, parts: Sequence[NodeParts]
) -> tuple[NodeParts | None, tuple[str, ...]]:
    """Joins what the nodes of a job have in its directory, pushed by all of them, into the volume of a checkpoint.

    Args:
        fleet: the fleet's store.
        store: of the node that commits; the joined list of files goes there and into the bucket.
        job: the job.
        epoch: the epoch that takes the checkpoint.
        base: the checkpoint that the epoch began with; or the files of its volume, where it may be removed meanwhile.
        parts: of all nodes.

    Returns:
        The volume as parts of their own, for `checkpoints.assemble`, None where all nodes have the same; and warnings.

    Raises:
        StorageError: a list of files is not in the bucket.
        CheckpointError: one is damaged.
    """
    having = {str(part.node): part.volume for part in parts if part.volume is not None}
    if len({ref.digest for ref in having.values()}) < 2:
        return None, ()
    trees = {node: fetch_tree(fleet, store.tenant, ref) for node, ref in having.items()}
    if isinstance(base, Manifest):
        base = None if base.volume is None else fetch_tree(fleet, store.tenant, base.volume)
    merged = merge(base, trees)
    for warning in merged.warnings:
        _log.warning("volumes differ", job=job, epoch=int(epoch), detail=warning)
    with store.begin(job, epoch) as writer:
        for entry in merged.tree.entries:
            writer.add_entry(Part.volume(), entry, list(CHUNK_REF.iter_unpack(base64.b64decode(entry.chunks))))
        written = writer.finish_parts()
    joined = NodeParts(parts[0].node, (), (), written.volume)
    push(fleet, store, joined, written.packs, of=(JobId(job), Epoch(epoch)))
    return joined, merged.warnings


def list_files(fleet: FleetStore, tenant: str, checkpoint: str) -> tuple[TreeEntry, ...]:
    """The objects of a checkpoint's volume, or of an uploaded directory, parents first.

    Raises:
        StorageError: there is no such checkpoint.
        CheckpointError: it is damaged.
    """
    return fetch_tree(fleet, tenant, _volume_of(fleet, tenant, checkpoint)[0]).entries


def read_file(fleet: FleetStore, tenant: str, checkpoint: str, path: str) -> bytes:
    """The content of one file of a checkpoint's volume, or of an uploaded directory.

    Raises:
        FileNotFoundError: there is no such file.
        StorageError: there is no such checkpoint, or the store does not answer.
        CheckpointError: it is damaged.
    """
    ref, packs = _volume_of(fleet, tenant, checkpoint)
    by_path = {entry.path: entry for entry in fetch_tree(fleet, tenant, ref).entries}
    entry = by_path.get(encode_path(os.fsencode(path)))
    if entry is not None and entry.kind == "hardlink":
        entry = by_path.get(entry.target or "")
    if entry is None or entry.kind != "file":
        raise FileNotFoundError(f"{path} is not a file of {checkpoint}.")
    return RemotePacks(fleet.bucket, tenant, fleet.hasher(tenant), packs).content(entry)


def fetch_files(
    fleet: FleetStore,
    tenant: str,
    checkpoint: str,
    files: Iterable[tuple[TreeEntry, Path]],
    *,
    progress: Progress | None = None,
) -> None:
    """Writes the contents of some regular files of `list_files`, each to a path that must not exist.

    Raises:
        StorageError: there is no such checkpoint, something is in the way, or the disk is full.
        CheckpointError: it is damaged.
    """
    _, packs = _volume_of(fleet, tenant, checkpoint)
    wanted: list[tuple[Path, TreeEntry]] = []
    for entry, path in files:
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(fd, entry.size)
            finally:
                os.close(fd)
        except OSError as error:
            raise from_os_error(error, f"write {path.name}", str(path.parent)) from error
        wanted.append((path, entry))
    RemotePacks(fleet.bucket, tenant, fleet.hasher(tenant), packs).fill(wanted, progress)


def download(
    fleet: FleetStore,
    tenant: str,
    checkpoint: str,
    path: str,
    dest: Path,
    *,
    base: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Writes a file or directory of a job's directory, as it is in a checkpoint, to a path that is not there yet.

    Args:
        fleet: the fleet's store.
        tenant: whose it is.
        checkpoint: of a job, whose changes are in it.
        path: relative to the job directory; ``.`` for all of it.
        dest: the copy's name.
        base: the uploaded directory that the job was submitted with.
        progress: told of bytes of each layer.

    Raises:
        StorageError: the path leads out of the directory (``storage.path``) or is not there (``storage.missing``), or
            something is at ``dest``.
        CheckpointError: it is damaged.
    """
    place = PurePosixPath(path)
    if place.is_absolute() or ".." in place.parts:
        raise StorageError(
            f"{path} is not a path within the job directory.",
            code="storage.path",
            remedy="Give it relative to that directory.",
        )
    if os.path.lexists(dest):
        raise StorageError(f"{dest} is there already.", code="storage.path", remedy="Name another place.")
    scratch = dest.absolute().parent / f".ergo-download-{secrets.token_hex(6)}"
    try:
        scratch.mkdir(mode=0o700)
        whole, changes = scratch / "base", scratch / "changes"
        if base is None:
            whole.mkdir()
        else:
            materialize(fleet, tenant, base, whole, progress=progress)
        materialize(fleet, tenant, checkpoint, changes, progress=progress)
        if (changes / "directory").is_dir():
            volume.merge_back(changes / "directory", whole)
        found = whole / place
        # No link on the way may lead out of the copy.
        inside = found == whole or found.parent.resolve().is_relative_to(whole.resolve())
        if not inside or not os.path.lexists(found):
            raise missing(path, f"the directory of checkpoint {checkpoint[:15]}")
        found.rename(dest)
    except OSError as error:
        raise from_os_error(error, f"write {dest.name}", str(dest.parent)) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return dest


def _volume_of(fleet: FleetStore, tenant: str, checkpoint: str) -> tuple[PartRef, Sequence[PackSize]]:
    """Where the volume of a checkpoint, or an uploaded directory, lies."""
    uploaded = documents.read(fleet.bucket, documents.volume_key(tenant, checkpoint), VolumeDocument)
    if uploaded is not None:
        return uploaded.volume, uploaded.packs
    key = documents.manifest_key(tenant, checkpoint)
    document = documents.read(fleet.bucket, key, CheckpointDocument)
    if document is None or document.manifest.volume is None:
        raise missing(f"A volume of {checkpoint}", fleet.bucket.url)
    packs = [item for item in document.packs if not document.volume_packs or item[0] in document.volume_packs]
    return document.manifest.volume, packs


def _walk(root: Path) -> Iterator[volume.Node]:
    own = root / IGNORE_FILE
    lines = own.read_text(encoding="utf-8", errors="replace").splitlines() if own.is_file() else []
    ignored = GitIgnoreSpec.from_lines([*ALWAYS_IGNORED, *lines])
    base = os.fsencode(root)
    pending = [b""]
    while pending:
        path = pending.pop()
        info = os.lstat(os.path.join(base, path))
        is_dir = stat.S_ISDIR(info.st_mode)
        if stat.S_ISSOCK(info.st_mode) or stat.S_ISCHR(info.st_mode) or stat.S_ISBLK(info.st_mode):
            continue
        if path and ignored.match_file(os.fsdecode(path) + ("/" if is_dir else "")):
            continue
        node = volume.read_node(base, path or b".", info)
        yield replace(node, xattrs={k: v for k, v in node.xattrs.items() if not k.startswith("trusted.")})
        if is_dir:
            names = sorted(os.listdir(os.path.join(base, path)), reverse=True)
            pending += [os.path.join(path, name) for name in names]


def _check_size(root: Path, nodes: Sequence[volume.Node], limit: int) -> None:
    total = sum(node.size for node in nodes)
    if total <= limit:
        return
    sizes: Counter[str] = Counter()
    for node in nodes:
        sizes[os.fsdecode(node.path.split(b"/")[0])] += node.size
    largest = ", ".join(f"{name} ({_human(size)})" for name, size in sizes.most_common(3) if size)
    raise StorageError(
        f"The job directory {root} has {_human(total)}, more than the limit of {_human(limit)}; its largest "
        f"entries are {largest}.",
        code=TOO_LARGE,
        remedy=f"Name what the job does not need in {root / IGNORE_FILE}, or mount big data on the nodes by its path.",
    )


def _human(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")

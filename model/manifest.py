"""Checkpoint manifest v1: what a checkpoint is, apart from its bytes.

A checkpoint is a Merkle structure. The manifest (a JSON file of a few kilobytes, named by its root) holds the
header and, for each rank and for the volume, a *part*: the hash of a *tree*, which is a list of entries. An entry
of a regular file holds the list of its chunks. Trees and chunks lie in packs, addressed by keyed blake3 of their
content; `proxy_runtime.checkpoint` stores and verifies them.

    manifest ── rank r ── process ── tree ── entry (pages-1.img) ── chunks
             │         └─ device  ── tree ── entry (storages)    ── chunks
             └─ volume ─────────────  tree ── entry (out/loss.txt) ── chunks

Everything here is shape: it validates itself and has no other behaviour. Hashes are lower-case hexadecimal,
sizes are bytes, times are nanoseconds since 1970 in UTC unless a name says otherwise.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from model.ids import CheckpointId, Epoch, JobId, Step, TenantId
from model.units import counted

MANIFEST_FORMAT = "ergosphere/manifest"
HEAD_FORMAT = "ergosphere/head"
TREE_FORMAT = "ergosphere/tree"
MANIFEST_VERSION = 1
"""Version of all three."""

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]


class _Shape(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _nothing(value: object) -> bool:
    """Left out, so that a manifest without it is what it was, to the byte."""
    return not value


# -- the classes that a checkpoint is bound to ---------------------------------------------------------------


class NumericsClass(_Shape):
    """What must be equal for the bits to be equal.

    Attributes:
        torch: version of torch with its local part, e.g. ``2.15.0+cu132``.
        device_model: e.g. ``cpu`` or ``NVIDIA H200``.
        instruction_set: what the kernels were selected by, e.g. ``AVX512``.
        threads_per_device: threads of a device's kernels; their number splits reductions.
        precision: flags that change results, e.g. ``{"allow_tf32": "false"}``.
    """

    torch: str
    device_model: str
    instruction_set: str
    threads_per_device: Positive
    precision: dict[str, str] = {}


class HostClass(_Shape):
    """What a process image expects of the host it is restored on.

    Attributes:
        cpu_features: flags of ``/proc/cpuinfo`` that the image may use, sorted.
        kernel_release: ``uname -r`` of the host that dumped.
    """

    cpu_features: tuple[str, ...]
    kernel_release: str


# -- the header: everything but the bytes --------------------------------------------------------------------


class CommunicatorState(_Shape):
    """A rank's counts of collectives in one communicator, at the cut.

    Attributes:
        name: the communicator, unique in the job.
        members: global ranks, in group order.
        contributed: collectives this rank has contributed to.
        completed: collectives whose result this rank has; equal over all members of one communicator.
        scatters: some of them gave each member its own part of a sum.
    """

    name: str
    members: tuple[Count, ...] = Field(min_length=1)
    contributed: Count
    completed: Count
    scatters: bool = Field(default=False, exclude_if=lambda scatters: not scatters)

    @model_validator(mode="after")
    def _counts(self) -> Self:
        if self.completed > self.contributed:
            raise ValueError(
                f"Communicator {self.name} has {self.completed} completed collectives, but only "
                f"{self.contributed} contributed ones."
            )
        if len(set(self.members)) != len(self.members):
            raise ValueError(f"Communicator {self.name} names a member twice.")
        return self


class RankState(_Shape):
    """One rank at the cut.

    Attributes:
        rank: the logical rank.
        step: optimizer steps finished.
        pending_operations: operations that are part of the device dump and run again after a load.
        pending_bytes: their payload.
        rendezvous_keys: keys of the rendezvous store in this rank's device dump.
        communicators: the communicators this rank is a member of.
        log_offset: length of the rank's log at the cut; a restore cuts the log there.
        device_bytes: what its tensors took of device memory; 0 where not known.
        peak_bytes: the most that they ever took; 0 where not known.
        gradient_bytes: what it hands to others in a step to be reduced, at most; 0 where not known.
        sketch: some of the ids of its device memory's chunks, always the same ones of equal chunks: ranks with a part
            of them in common hold the same parameters.
    """

    rank: Count
    step: Step
    pending_operations: Count = 0
    pending_bytes: Count = 0
    rendezvous_keys: Count = 0
    communicators: tuple[CommunicatorState, ...] = ()
    log_offset: Count = 0
    device_bytes: Count = Field(default=0, exclude_if=_nothing)
    peak_bytes: Count = Field(default=0, exclude_if=_nothing)
    gradient_bytes: Count = Field(default=0, exclude_if=_nothing)
    sketch: tuple[str, ...] = Field(default=(), exclude_if=_nothing)


Pack = Literal["rank", "node"]


def steps_of(ranks: Iterable[RankState], pack: Pack) -> tuple[Step, ...]:
    """The steps by which a job's progress is told: those of all ranks.

    Of a job that starts its own ranks it is that of the foremost channel: many are used by nobody or by processes that
    take no step, and a process that comes late must not set the job back.
    """
    steps = tuple(rank.step for rank in ranks)
    return steps if pack == "rank" else tuple(sorted(steps)[-1:])


class ManifestHeader(_Shape):
    """What the one who takes a checkpoint knows about it. The store adds job, epoch and parts.

    Attributes:
        world_size: number of ranks, constant for a job's life.
        placement: per rank, the device it was on at the cut.
        argv: command line of the job.
        cwd: absolute path of the job directory as the ranks see it.
        env: the environment a restore needs. Never holds secrets: those are references.
        network: of the ranks: the host's, or a namespace of their own.
        pack: ``node``: the job is one process tree, kept as rank 0's, and ranks are the channels to its devices.
        python: interpreter of the job where it is not the runtime's own; a restore needs it at the same path.
        build_id: the runtime build whose files the process images map.
        created_at_ns: when the cut was taken.
        ranks: one for each rank, in rank order.
        parent: the checkpoint this one continues; None for the first of a job, or to let the store fill in
            the job's ``HEAD``.
    """

    world_size: Positive
    placement: tuple[str, ...]
    argv: tuple[str, ...]
    cwd: str
    env: dict[str, str] = {}
    network: Literal["host", "none", "private"] = "host"
    pack: Pack = Field(default="rank", exclude_if=lambda pack: pack == "rank")
    python: str = Field(default="", exclude_if=lambda python: not python)
    build_id: str
    numerics: NumericsClass
    host: HostClass
    created_at_ns: Count
    ranks: tuple[RankState, ...]
    parent: CheckpointId | None = None

    @property
    def steps(self) -> tuple[Step, ...]:
        """See `steps_of`; the lowest is the checkpoint's."""
        return steps_of(self.ranks, self.pack)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if [r.rank for r in self.ranks] != list(range(self.world_size)):
            raise ValueError(f"A header of world size {self.world_size} must list ranks 0 to {self.world_size - 1}.")
        if len(self.placement) != self.world_size:
            raise ValueError(
                f"The placement names {counted(len(self.placement), 'device')} for {counted(self.world_size, 'rank')}."
            )
        completed: dict[str, tuple[int, tuple[int, ...]]] = {}
        for rank in self.ranks:
            for comm in rank.communicators:
                if rank.rank not in comm.members or max(comm.members) >= self.world_size:
                    raise ValueError(f"Communicator {comm.name} of rank {rank.rank} has members {comm.members}.")
                seen = completed.setdefault(comm.name, (comm.completed, comm.members))
                if seen != (comm.completed, comm.members):
                    raise ValueError(
                        f"Communicator {comm.name} is not at one cut: rank {rank.rank} has completed {comm.completed} "
                        f"of members {comm.members}, another rank {seen[0]} of {seen[1]}."
                    )
        return self


# -- parts ---------------------------------------------------------------------------------------------------


class PartRef(_Shape):
    """A part's tree: a hash, and where its bytes are.

    Attributes:
        digest: Merkle node over the tree's entries.
        chunks: ids of the chunks that hold the tree's JSON, in order.
        tree_bytes: length of that JSON.
        entries: number of entries.
        bytes: sum of the sizes of the regular files.
    """

    digest: Digest
    chunks: tuple[Digest, ...]
    tree_bytes: Count
    entries: Count
    bytes: Count


class RankParts(_Shape):
    """The parts of one rank; a part that was not added is None.

    Attributes:
        exit_code: of a rank that has no process any more, as a shell tells it: 128 + N where signal N ended it. None
            where it runs on, and for a channel of a job that starts its own ranks.
    """

    rank: Count
    process: PartRef | None = None
    device: PartRef | None = None
    exit_code: int | None = Field(default=None, exclude_if=lambda code: code is None)


def why_over(ranks: Sequence[RankParts], pack: Pack) -> str:
    """Why no job can go on from these parts, as a sentence without its end; empty where one can.

    A rank is in a checkpoint with its process, or with the record that it had exited with 0. Where nobody has a
    process there is nothing to go on with.
    """
    ended = all(rank.process is None for rank in _trees(ranks, pack))
    return why_lost(ranks, pack) or ("every rank had ended by then" if ended else "")


def why_lost(ranks: Sequence[RankParts], pack: Pack) -> str:
    """Why one of some ranks cannot go on from its parts, as of `why_over`."""
    for rank in _trees(ranks, pack):
        if rank.process is None and rank.exit_code != 0:
            code = rank.exit_code
            how = "nothing says how it had ended" if code is None else f"it had ended with exit code {code}"
            return f"rank {rank.rank} has no process in it, and {how}"
    return ""


def _trees(ranks: Sequence[RankParts], pack: Pack) -> list[RankParts]:
    return [rank for rank in ranks if pack == "rank" or rank.rank == 0]


class Manifest(_Shape):
    """A checkpoint, version 1.

    Attributes:
        key_id: names the tenant key that the hashes are keyed with, without telling it.
        root: the checkpoint's id: Merkle root over all other fields, keyed: nobody without the key can make one.
        packs: packs that held the chunks when it was written. Only a hint: repacking moves chunks.
        stored_bytes: what this checkpoint added to the store.
    """

    format: Literal["ergosphere/manifest"] = MANIFEST_FORMAT
    version: Literal[1] = MANIFEST_VERSION
    tenant: TenantId
    job: JobId
    epoch: Epoch
    key_id: str
    header: ManifestHeader
    ranks: tuple[RankParts, ...]
    volume: PartRef | None = None
    root: CheckpointId
    packs: tuple[str, ...] = ()
    stored_bytes: Count = 0

    @model_validator(mode="after")
    def _ranks(self) -> Self:
        if [r.rank for r in self.ranks] != list(range(self.header.world_size)):
            raise ValueError(f"A manifest of world size {self.header.world_size} must list the parts of every rank.")
        return self


class Head(_Shape):
    """A job's ``HEAD``: the one committed checkpoint that counts, and the epoch that wrote it."""

    format: Literal["ergosphere/head"] = HEAD_FORMAT
    version: Literal[1] = 1
    job: JobId
    epoch: Epoch
    checkpoint: CheckpointId
    sequence: Positive


# -- trees ---------------------------------------------------------------------------------------------------

EntryKind = Literal["file", "directory", "symlink", "hardlink", "whiteout", "fifo"]


def encode_path(path: bytes) -> str:
    """Text form of a path: UTF-8 as it is, anything else as a NUL, which no path holds, and base64."""
    try:
        return path.decode()
    except UnicodeDecodeError:
        return "\0" + base64.b64encode(path).decode()


def decode_path(text: str) -> bytes:
    """The path of a text made by :func:`encode_path`."""
    return base64.b64decode(text[1:], validate=True) if text.startswith("\0") else text.encode()


class TreeEntry(_Shape):
    """One file-system object of a part.

    Attributes:
        path: relative to the part's root, ``.`` for the root itself; see :func:`encode_path`.
        mode: permission bits with setuid, setgid and sticky.
        xattrs: extended attributes, values in base64.
        target: of a symlink its text, of a hard link the path of the entry it equals.
        size: length of a regular file.
        digest: Merkle node over the chunks of a regular file.
        chunks: base64 of 36 bytes a chunk: id (32), length (u32, little-endian); an id of zeros is a hole or
            a run of zeros, of which nothing is stored.
    """

    path: str
    kind: EntryKind
    mode: Annotated[int, Field(ge=0, le=0o7777)] = 0o644
    uid: Count = 0
    gid: Count = 0
    mtime_ns: int = 0
    xattrs: dict[str, str] = {}
    target: str | None = None
    size: Count = 0
    digest: Digest | None = None
    chunks: str = ""

    @model_validator(mode="after")
    def _shape(self) -> Self:
        parts = decode_path(self.path).split(b"/")
        if self.path != "." and any(p in (b"", b".", b"..") for p in parts):
            raise ValueError(f"Entry path {self.path!r} is not a plain relative path.")
        if (self.target is not None) != (self.kind in ("symlink", "hardlink")):
            raise ValueError(f"Entry {self.path!r} of kind {self.kind} must {'' if self.target is None else 'not '}"
                             "have a target.")  # fmt: skip
        if (self.digest is not None) != (self.kind == "file"):
            raise ValueError(f"Entry {self.path!r} of kind {self.kind} has a wrong digest field.")
        return self


class Tree(_Shape):
    """The content of one part. Parents come before their children, a hard link after what it links to."""

    format: Literal["ergosphere/tree"] = TREE_FORMAT
    version: Literal[1] = MANIFEST_VERSION
    entries: tuple[TreeEntry, ...]

    @model_validator(mode="after")
    def _order(self) -> Self:
        seen: dict[str, str] = {}
        for entry in self.entries:
            if entry.path in seen:
                raise ValueError(f"Path {entry.path!r} occurs twice in a tree.")
            raw = decode_path(entry.path)
            if b"/" in raw and seen.get(encode_path(raw.rsplit(b"/", 1)[0])) != "directory":
                raise ValueError(f"The directory of {entry.path!r} does not come before it.")
            if entry.kind == "hardlink" and seen.get(entry.target or "") not in ("file", "symlink", "fifo"):
                raise ValueError(f"Hard link {entry.path!r} names {entry.target!r}, which does not come before it.")
            seen[entry.path] = entry.kind
        return self

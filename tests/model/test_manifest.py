"""Manifest v1: its shape, and that it stays what it is."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from model.ids import CheckpointId, Epoch, JobId, Step, TenantId
from model.manifest import (
    CommunicatorState,
    Head,
    HostClass,
    Manifest,
    ManifestHeader,
    NumericsClass,
    Pack,
    PartRef,
    RankParts,
    RankState,
    Tree,
    TreeEntry,
    decode_path,
    encode_path,
    why_over,
)

DIGEST = "ab" * 32


def a_communicator(**fields: Any) -> CommunicatorState:
    return CommunicatorState(**{"name": "world", "members": (0, 1), "contributed": 3, "completed": 3, **fields})


def a_header(**fields: Any) -> ManifestHeader:
    values: dict[str, Any] = {
        "world_size": 2,
        "placement": ("cpu:0", "cpu:1"),
        "argv": ("python", "train.py"),
        "cwd": "/job",
        "env": {"RANK": "0"},
        "build_id": "build-1",
        "numerics": NumericsClass(
            torch="2.15.0", device_model="cpu", instruction_set="AVX2", threads_per_device=1, precision={"tf32": "off"}
        ),
        "host": HostClass(cpu_features=("avx",), kernel_release="6.18.0"),
        "created_at_ns": 1,
        "ranks": (
            RankState(rank=0, step=Step(7), pending_operations=1, pending_bytes=64, communicators=(a_communicator(),)),
            RankState(rank=1, step=Step(7), rendezvous_keys=4, log_offset=12, communicators=(a_communicator(),)),
        ),
    }
    return ManifestHeader(**{**values, **fields})


def a_manifest(**fields: Any) -> Manifest:
    part = PartRef(digest=DIGEST, chunks=(DIGEST,), tree_bytes=100, entries=2, bytes=4096)
    values: dict[str, Any] = {
        "tenant": TenantId("local"),
        "job": JobId("job"),
        "epoch": Epoch(3),
        "key_id": "0123456789abcdef",
        "header": a_header(),
        "ranks": (RankParts(rank=0, process=part, device=part), RankParts(rank=1)),
        "volume": part,
        "root": CheckpointId("ck-" + "ab" * 20),
    }
    return Manifest(**{**values, **fields})


@pytest.mark.parametrize(
    ("pack", "ranks", "why"),
    [
        ("rank", [("p", None), ("p", None)], ""),
        ("rank", [("p", None), ("", 0)], ""),
        ("rank", [("p", None), ("", None)], "rank 1 has no process in it, and nothing says how it had ended"),
        ("rank", [("", 137), ("p", None)], "rank 0 has no process in it, and it had ended with exit code 137"),
        ("rank", [("", 0), ("", 0)], "every rank had ended by then"),
        ("node", [("p", None), ("", None)], ""),
        ("node", [("", 0), ("", None)], "every rank had ended by then"),
        ("node", [("", None), ("", None)], "rank 0 has no process in it, and nothing says how it had ended"),
    ],
)
def test_a_job_goes_on_from_ranks_that_live_or_have_exited_with_0(
    pack: Pack, ranks: list[tuple[str, int | None]], why: str
) -> None:
    part = PartRef(digest=DIGEST, chunks=(DIGEST,), tree_bytes=100, entries=2, bytes=4096)
    parts = [RankParts(rank=n, process=part if p else None, exit_code=code) for n, (p, code) in enumerate(ranks)]
    assert why_over(parts, pack) == why


def test_the_end_of_a_rank_is_part_of_a_manifest_and_none_leaves_it_as_it_was() -> None:
    ended = RankParts(rank=1, exit_code=0)
    assert RankParts.model_validate_json(ended.model_dump_json()) == ended
    assert "exit_code" not in RankParts(rank=1).model_dump(mode="json")


def test_json_round_trip() -> None:
    manifest = a_manifest()
    assert Manifest.model_validate_json(manifest.model_dump_json()) == manifest


def test_version_1_is_read_for_ever() -> None:
    """The JSON of the first release, field by field: renaming or adding a required one breaks old checkpoints."""
    document = {
        "format": "ergosphere/manifest",
        "version": 1,
        "tenant": "local",
        "job": "job",
        "epoch": 3,
        "key_id": "0123456789abcdef",
        "header": {
            "world_size": 1,
            "placement": ["cpu:0"],
            "argv": ["python", "train.py"],
            "cwd": "/job",
            "env": {},
            "network": "host",
            "build_id": "build-1",
            "numerics": {
                "torch": "2.15.0",
                "device_model": "cpu",
                "instruction_set": "AVX2",
                "threads_per_device": 1,
                "precision": {},
            },
            "host": {"cpu_features": ["avx"], "kernel_release": "6.18.0"},
            "created_at_ns": 1,
            "ranks": [
                {
                    "rank": 0,
                    "step": 7,
                    "pending_operations": 0,
                    "pending_bytes": 0,
                    "rendezvous_keys": 0,
                    "communicators": [{"name": "w", "members": [0], "contributed": 2, "completed": 1}],
                    "log_offset": 0,
                }
            ],
            "parent": None,
        },
        "ranks": [
            {
                "rank": 0,
                "process": None,
                "device": {"digest": DIGEST, "chunks": [DIGEST], "tree_bytes": 100, "entries": 2, "bytes": 4096},
            }
        ],
        "volume": None,
        "root": "ck-" + "ab" * 20,
        "packs": ["ab" * 20],
        "stored_bytes": 5,
    }
    assert Manifest.model_validate(document).model_dump(mode="json") == document


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 2}, "version"),
        ({"epoch": -1}, "epoch"),
        ({"job": "../x"}, "job"),
        ({"root": "00"}, "root"),
        ({"ranks": (RankParts(rank=0),)}, "parts of every rank"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        a_manifest(**change)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"world_size": 3}, "ranks 0 to 2"),
        ({"placement": ("cpu:0",)}, "1 device for 2 ranks"),
        ({"ranks": (RankState(rank=1, step=Step(0)), RankState(rank=0, step=Step(0)))}, "ranks 0 to 1"),
        (
            {
                "ranks": tuple(
                    RankState(rank=r, step=Step(0), communicators=(a_communicator(completed=2 + r),)) for r in (0, 1)
                )
            },
            "not at one cut",
        ),
        (
            {
                "ranks": (
                    RankState(rank=0, step=Step(0), communicators=(a_communicator(members=(0, 5)),)),
                    RankState(rank=1, step=Step(0)),
                )
            },
            "has members",
        ),
        ({"created_at_ns": -1}, "created_at_ns"),
    ],
)
def test_a_header_that_makes_no_sense_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        a_header(**change)


def test_completed_without_contribution_is_refused() -> None:
    with pytest.raises(ValidationError, match="only 3 contributed"):
        a_communicator(completed=4)
    with pytest.raises(ValidationError, match="twice"):
        a_communicator(members=(0, 0))


def test_head_round_trip() -> None:
    head = Head(job=JobId("job"), epoch=Epoch(1), checkpoint=CheckpointId("ck-" + "0" * 40), sequence=1)
    assert Head.model_validate_json(head.model_dump_json()) == head


@pytest.mark.parametrize("raw", [b"plain", "Größe".encode(), b"\xff\xfe", b"a/b", b"nul-like \\0"])
def test_paths_survive(raw: bytes) -> None:
    assert decode_path(encode_path(raw)) == raw


@pytest.mark.parametrize("path", ["/etc/passwd", "../up", "a/../b", "", "a//b", "./a", "a/"])
def test_a_path_that_leaves_its_part_is_refused(path: str) -> None:
    with pytest.raises(ValidationError, match="plain relative path"):
        TreeEntry(path=path, kind="directory")
    with pytest.raises(ValidationError, match="plain relative path"):
        TreeEntry(path=encode_path(b"\xff/../x"), kind="directory")


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([{"path": "a/b", "kind": "file", "digest": DIGEST}], "does not come before"),
        ([{"path": "a", "kind": "symlink", "target": "/etc"}, {"path": "a/b", "kind": "directory"}], "come before"),
        ([{"path": "a", "kind": "directory"}, {"path": "a", "kind": "directory"}], "twice"),
        ([{"path": "a", "kind": "hardlink", "target": "b"}], "names 'b'"),
        ([{"path": "a", "kind": "directory"}, {"path": "b", "kind": "hardlink", "target": "a"}], "names 'a'"),
        ([{"path": "a", "kind": "symlink"}], "have a target"),
        ([{"path": "a", "kind": "file"}], "digest"),
        ([{"path": "a", "kind": "device"}], "kind"),
        ([{"path": "a", "kind": "directory", "mode": 0o10000}], "mode"),
    ],
)
def test_a_tree_that_makes_no_sense_is_refused(entries: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Tree.model_validate({"entries": entries})

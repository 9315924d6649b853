"""Buckets in a directory and in memory: whole or not at all, one creator, errors in sentences."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from proxy_runtime.storage import Bucket, StorageError


@pytest.fixture(params=["memory://", "file"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Bucket:
    return Bucket.open(request.param if request.param != "file" else f"file://{tmp_path}/my%20bucket")


def test_what_is_put_is_there(bucket: Bucket, tmp_path: Path) -> None:
    assert bucket.get("a/b") is None and bucket.size("a/b") is None and bucket.list("a") == []
    bucket.put("a/b", b"one")
    bucket.put("a/b", b"three")
    assert bucket.get("a/b") == b"three" and bucket.size("a/b") == 5
    assert bucket.create("a/c", b"x") and not bucket.create("a/c", b"y") and bucket.get("a/c") == b"x"
    assert bucket.list("a") == bucket.list("a/") == ["a/b", "a/c"] and bucket.list("") == ["a/b", "a/c"]
    assert [found.bytes for found in bucket.find("a")] == [5, 1]
    bucket.put("ab/c", b"")
    assert bucket.list("a") == ["a/b", "a/c"]
    bucket.delete("a/b")
    bucket.delete("a/b")
    assert bucket.list("a") == ["a/c"]
    source = tmp_path / "source"
    source.write_bytes(os.urandom(20_000_000))
    bucket.put_file("big/file", source)
    bucket.get_file("big/file", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()
    assert bucket.get_range("big/file", 5, 7) == source.read_bytes()[5:12]
    assert b"".join(bucket.stream("big/file", 19_000_000, 1_000_000)) == source.read_bytes()[19_000_000:]
    with pytest.raises(FileNotFoundError):
        bucket.get_file("none", tmp_path / "none")


def _create(url: str) -> int:
    bucket = Bucket.open(url)
    return sum(bucket.create(f"r/{n:03}", str(os.getpid()).encode() * 500) for n in range(25))


def test_of_several_processes_one_creates(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/bucket"
    with ProcessPoolExecutor(3, multiprocessing.get_context("spawn")) as pool:
        assert sum(pool.map(_create, [url] * 3)) == 25
    bucket = Bucket.open(url)
    assert all(len(set((bucket.get(key) or b"").split())) == 1 for key in bucket.list("r"))


def test_what_is_created_is_on_disk_before_it_has_its_name(tmp_path: Path) -> None:
    """A crash of the machine must not leave a name without its bytes: seen from the system calls, in their order."""
    program = "import sys; from proxy_runtime.storage import Bucket; Bucket.open(sys.argv[1]).create('r/1', b'x' * 99)"
    url, trace = f"file://{tmp_path}/bucket", tmp_path / "trace"
    command = ["strace", "-f", "-e", "trace=fsync,link,linkat", "-o", str(trace), sys.executable, "-c", program, url]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("system calls cannot be traced here")
    calls = [line.split(None, 1)[1] for line in trace.read_text().splitlines() if "link" in line or "fsync" in line]
    at = next(i for i, call in enumerate(calls) if call.startswith("link") and "r/1" in call)
    assert calls[at - 1].startswith("fsync") and calls[at + 1].startswith("fsync")


@pytest.mark.parametrize("url", ["", "here/there", "file://relative/x", "ftp://host/x", "s3://"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(StorageError) as caught:
        Bucket.open(url)
    assert caught.value.code == "storage.address" and "file:///" in caught.value.remedy


def test_a_key_that_leads_out_is_no_key(tmp_path: Path) -> None:
    bucket = Bucket.open(f"file://{tmp_path}/bucket")
    with pytest.raises(ValueError, match="not a key"):
        bucket.put("../x", b"")


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="open the fleet's store"):
        Bucket.open(f"file://{tmp_path}/file/bucket")


def test_a_store_that_is_away_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import proxy_runtime.storage.blobs as blobs

    monkeypatch.setattr(blobs, "_RETRY", {"max_retries": 0})
    for name, value in {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "none",
        "AWS_SECRET_ACCESS_KEY": "none",
        "AWS_REGION": "nowhere",
    }.items():
        monkeypatch.setenv(name, value)
    bucket = Bucket.open("s3://bucket/prefix")
    with pytest.raises(StorageError, match="does not answer") as caught:
        bucket.get("x")
    assert caught.value.code == "storage.unreachable" and "none" not in caught.value.message

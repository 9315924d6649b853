"""`ergo download` and `ergo logs` from checkpoints: what is in the store, made as a node makes it."""

from __future__ import annotations

import os

import pytest

from cli.fleet.download import destination, inside
from model.job_spec import UploadedVolume, parse_job_spec
from model.job_state import JobPhase
from model.names import JOB_TASK_QUEUE
from proxy_runtime.errors import ErgoError
from tests.cli.job_double import JobDouble
from tests.cli.samples import view


@pytest.fixture
async def ended(client, worker, store, tmp_path):
    """A job that was submitted with a directory, and whose final volume is in the store.

    A checkpoint's volume and an uploaded directory are the same to who reads it; what is uploaded here is laid out as
    a checkpoint's volume is.
    """
    from proxy_runtime.storage.volumes import upload_directory

    submitted, final = tmp_path / "submitted", tmp_path / "final"
    (submitted / "data").mkdir(parents=True)
    (submitted / "train.py").write_text("print('hello')\n")
    (submitted / "data" / "a").write_text("a")
    (submitted / "data" / "b").write_text("b")
    results = final / "directory" / "results"
    results.mkdir(parents=True)
    (results / "weights.bin").write_bytes(os.urandom(3 << 20))
    (results / "latest").symlink_to("weights.bin")
    (final / "directory" / "data").mkdir()
    (final / "directory" / "data" / "a").write_text("changed")
    (final / "private" / "logs").mkdir(parents=True)
    for rank in range(2):
        (final / "private" / "logs" / f"rank-{rank}.log").write_text(f"step 1\nend of {rank}\n")
    base, last = (upload_directory(store, "default", path) for path in (submitted, final))
    spec = parse_job_spec({"apiVersion": "ergosphere/v1", "argv": ["python", "train.py"], "ranks": 2})
    spec = spec.model_copy(update={"volume": UploadedVolume(manifest=base)})
    handle = await client.start_workflow(
        JobDouble.run, spec, id=f"done-{tmp_path.name[-3:].strip('_')}-x", task_queue=JOB_TASK_QUEUE
    )
    shown = view(handle.id, phase=JobPhase.COMPLETED, placement=(), width=0, checkpoints=(), final=last, exit_code=0)
    await handle.signal("become", shown)
    yield handle, results
    await handle.terminate()


async def test_a_directory(ergo, ended, tmp_path):
    handle, results = ended
    done = await ergo("download", handle.id, "results", "copy")
    copy = ergo.directory / "copy"
    assert (copy / "weights.bin").read_bytes() == (results / "weights.bin").read_bytes()
    assert os.readlink(copy / "latest") == "weights.bin"
    assert done.out == ""
    assert sorted(path.name for path in ergo.directory.iterdir()) == ["copy"]


async def test_a_file_into_a_directory(ergo, ended):
    handle, results = ended
    await ergo("download", handle.id, "results/weights.bin", ".")
    assert (ergo.directory / "weights.bin").read_bytes() == (results / "weights.bin").read_bytes()
    late = await ergo("download", handle.id, "results/weights.bin", ".", code=1)
    assert "is there already" in late.err


async def test_changes_over_what_was_submitted(ergo, ended):
    handle, _ = ended
    await ergo("download", handle.id, ".", "all")
    everything = ergo.directory / "all"
    assert (everything / "data" / "a").read_text() == "changed"
    assert (everything / "data" / "b").read_text() == "b"
    assert (everything / "train.py").read_text() == "print('hello')\n"
    assert not (everything / "private").exists()


async def test_what_is_not_there(ergo, ended):
    handle, _ = ended
    done = await ergo("download", handle.id, "results/weigths.bin", "copy", code=1)
    assert done.err == (
        f"ergo: Job {handle.id} has no results/weigths.bin. Did you mean results/weights.bin? "
        "Beside it there are latest, weights.bin.\n"
    )
    assert list(ergo.directory.iterdir()) == []
    for path in ("../x", "/etc/passwd"):
        done = await ergo("download", handle.id, path, "copy", code=1)
        assert "not a path within the job directory" in done.err


async def test_a_place_that_is_not_there(ergo, ended):
    done = await ergo("download", ended[0].id, "results", "none/copy", code=1)
    assert "none does not exist" in done.err


async def test_a_job_of_which_nothing_is_kept(ergo, job, store):
    handle = await job("fresh")
    done = await ergo("download", handle.id, ".", "copy", code=1)
    assert "Nothing of job" in done.err
    assert f"`ergo checkpoint {handle.id} --wait`" in done.err


async def test_logs_of_an_ended_job(ergo, ended):
    handle, _ = ended
    done = await ergo("logs", handle.id)
    assert done.out == "[rank0] step 1\n[rank0] end of 0\n[rank1] step 1\n[rank1] end of 1\n"
    assert (await ergo("logs", handle.id, "--rank", "1", "-f")).out == "step 1\nend of 1\n"


def test_destinations(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "full" / "x").mkdir(parents=True)
    (tmp_path / "full" / "x" / "y").touch()
    assert destination(inside("a/b"), tmp_path / "new") == tmp_path / "new"
    assert destination(inside("a/b"), tmp_path / "full") == tmp_path / "full" / "b"
    assert destination(inside("."), tmp_path / "empty") == tmp_path / "empty"
    with pytest.raises(ErgoError, match="is there already"):
        destination(inside("."), tmp_path / "full")
    with pytest.raises(ErgoError, match="is there already"):
        destination(inside("a/x"), tmp_path / "full")

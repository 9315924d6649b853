"""`ergo submit`: from a directory to a workflow, and back to its exit code."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import Iterator

import pytest
from temporalio.client import Client
from temporalio.worker import Worker

from cli.fleet.submit import details, summary, too_few
from infra.converter import DATA_CONVERTER
from model.job_spec import JobSpec, UploadedVolume, parse_job_spec
from model.job_state import JobPhase
from model.names import JOB_TASK_QUEUE
from tests.cli.conftest import DEADLINE_S
from tests.cli.job_double import JobDouble
from tests.cli.samples import NODE_1, node, view
from tests.infra.fixtures import Server, new_temporal

SECRET = "not-to-be-seen"


@pytest.fixture
def project(ergo):
    (ergo.directory / "train.py").write_text("print('hello')\n")
    (ergo.directory / "data").mkdir()
    (ergo.directory / "data" / "big.bin").write_bytes(bytes(range(256)) * 4096)
    (ergo.directory / ".ergoignore").write_text("*.log\n")
    (ergo.directory / "old.log").write_text("x")
    return ergo.directory


async def spec_of(client, job):
    """The input that a workflow was started with."""
    async for event in client.get_workflow_handle(job).fetch_history_events():
        payloads = event.workflow_execution_started_event_attributes.input.payloads
        (spec,) = await client.data_converter.decode(payloads, [JobSpec])
        return spec
    raise AssertionError("a workflow has a first event")


async def end(client, job):
    await client.get_workflow_handle(job).terminate()


async def test_a_directory_becomes_a_job(ergo, client, project, store):
    done = await ergo("submit", "--tier", "premium", "--ranks", "2", "--env", f"A={SECRET}", "train.py", "--steps", "3")
    job = done.out.strip()
    assert re.fullmatch(r"train-[a-z0-9]{6}", job)
    assert done.out == f"{job}\n"
    try:
        assert f"ergo show {job}" in done.err
        assert SECRET not in done.err
        spec = await spec_of(client, job)
        assert spec.argv == ("python", "train.py", "--steps", "3")
        assert (spec.tier, spec.ranks) == ("premium", 2)
        assert isinstance(spec.volume, UploadedVolume)
        found = await client.get_workflow_handle(job).describe()
        assert await found.static_summary() == "train: premium, 2 ranks, default"
        assert SECRET not in (await found.static_details() or "")
        assert found.search_attributes["ErgoTier"] == ["premium"]
    finally:
        await end(client, job)


async def test_what_is_known_to_stand_in_the_way_is_told(ergo, client, project, store):
    store.claim_node(node(NODE_1))
    done = await ergo("submit", "--ranks", "3", "--min-devices", "3", "train.py")
    try:
        assert "it needs at least 3 devices, and the fleet has 2: it stays queued" in done.err
    finally:
        await end(client, done.out.strip())


async def test_dry_run_starts_nothing(ergo, client, project):
    done = await ergo("submit", "--dry-run", "--ranks", "2", "train.py")
    spec = parse_job_spec(done.out)
    assert (spec.ranks, spec.name) == (2, "train")
    assert "would be uploaded" in done.err


async def test_a_dry_run_needs_no_fleet(ergo, plain_env, project):
    ergo.env = plain_env
    assert json.loads((await ergo("submit", "--dry-run", "train.py")).out)["argv"] == ["python", "train.py"]


async def test_a_module_needs_no_upload(ergo, project):
    done = await ergo("submit", "--dry-run", "--no-upload", "-m", "http.server", "--bind", "::")
    spec = parse_job_spec(done.out)
    assert (spec.argv, spec.name) == (("python", "-m", "http.server", "--bind", "::"), "http.server")
    assert done.err == ""


async def test_a_launcher(ergo, client, project, store):
    store.claim_node(node(NODE_1))
    done = await ergo("submit", "--pack", "node", "--devices", "3", "torchrun", "--nproc-per-node", "3", "train.py")
    try:
        spec = await spec_of(client, done.out.strip())
        assert spec.argv == ("torchrun", "--nproc-per-node", "3", "train.py")
        assert (spec.pack, spec.devices_per_rank, spec.name) == ("node", 3, "train")
        assert "it needs 3 devices on one node, and none has more than 2" in done.err
    finally:
        await end(client, done.out.strip())


async def test_a_job_file(ergo, client, project, store):
    (project / "job.yaml").write_text(
        "apiVersion: ergosphere/v1\nname: char GPT\nranks: 2\ntier: basic\n"
        "argv: [python, train.py]\nvolume: {kind: empty}\n"
    )
    done = await ergo("submit", "-f", "job.yaml", "--tier", "standard")
    job = done.out.strip()
    try:
        assert job.startswith("char-gpt-")
        spec = await spec_of(client, job)
        assert (spec.tier, spec.ranks, spec.volume.kind) == ("standard", 2, "empty")
    finally:
        await end(client, job)


async def test_all_faults_of_a_job_file_at_once(ergo, project):
    (project / "job.yaml").write_text("apiVersion: ergosphere/v1\nranks: 0\ntier: gold\nargv: [x]\ncolour: red\n")
    done = await ergo("submit", "-f", "job.yaml", code=2)
    assert "3 faults" in done.err
    for part in ("`ranks`", "'premium', 'standard' or 'basic'", "`colour`"):
        assert part in done.err
    assert done.out == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "A script is needed."),
        (["missing.py"], "missing.py does not exist"),
        (["../secret"], "outside of the directory"),
        (["--tier", "gold", "train.py"], "'premium', 'standard' or 'basic'"),
        (["--ranks", "0", "train.py"], "`ranks` is 0"),
        (["--min-devices", "3", "--ranks", "2", "train.py"], "`min_width` is 3"),
        (
            ["--min-devices", "3", "--ranks", "4", "train.py"],
            "`min_width` is 3, but 4 ranks cannot be shared out evenly",
        ),
        (["--env", "A", "train.py"], "NAME=VALUE"),
        (["--env", "API_TOKEN=x", "train.py"], "secret"),
        (["--dir", "nowhere", "train.py"], "nowhere does not exist"),
        (["--dir", ".", "--no-upload", "train.py"], "Leave out one"),
        (["--no-upload", "train.py"], "absolute path"),
        (["-f", "none.yaml"], "none.yaml cannot be read"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
async def test_wrong_usage_is_one_sentence(ergo, project, arguments, says):
    done = await ergo("submit", *arguments, code=2)
    assert says in done.err
    assert done.out == ""


async def test_options_of_ours_after_the_script_are_its_own_and_that_is_said(ergo, project):
    words = ["train.py", "--steps", "3", "--dry-run", "--name=x", "--", "--tier"]
    done = await ergo("submit", "--dry-run", *words)
    assert json.loads(done.out)["argv"] == ["python", *words]
    note = "--name, --dry-run after the script goes to the script; options of `ergo submit` come before it"
    assert note in done.err and "--tier after" not in done.err
    done = await ergo("submit", "--dry-run", "train.py", "--steps", "3")
    assert "after the script" not in done.err


async def test_no_fleet_uploads_nothing(ergo, plain_env, project, tmp_path):
    ergo.env = {**ergo.env, "TEMPORAL_ADDRESS": "127.0.0.1:1"}
    done = await ergo("submit", "train.py", code=1)
    assert "does not answer" in done.err
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []


async def ends(client, process, **fields):
    """Lets the job that a waiting `submit` has started end; returns the exit code and what was said."""
    async with asyncio.timeout(DEADLINE_S):
        job = (await process.stdout.readline()).decode().strip()
        handle = client.get_workflow_handle(job)
        await handle.signal("become", view(job, **fields))
        _, err = await process.communicate()
        await handle.signal("end")
    return process.returncode, err.decode()


@pytest.mark.parametrize(
    ("fields", "code", "says"),
    [
        ({"phase": JobPhase.COMPLETED, "exit_code": 0}, 0, "running on node-1"),
        ({"phase": JobPhase.FAILED, "exit_code": 7, "failure": "Rank 0 ended with 7."}, 7, "Rank 0 ended with 7."),
        ({"phase": JobPhase.FAILED, "failure": "No progress."}, 1, "No progress."),
        ({"phase": JobPhase.CANCELLED}, 130, ""),
    ],
    ids=["completed", "failed", "failed-by-us", "cancelled"],
)
async def test_waiting_ends_as_the_job_does(ergo, client, project, worker, store, fields, code, says):
    process = await ergo.start("submit", "--wait", "train.py")
    ended, err = await ends(client, process, **fields)
    assert ended == code
    assert says in err


async def test_ctrl_c_leaves_the_job_running(ergo, client, project, worker, store):
    process = await ergo.start("submit", "--wait", "train.py")
    async with asyncio.timeout(DEADLINE_S):
        job = (await process.stdout.readline()).decode().strip()
        while "waiting: " not in (await process.stderr.readline()).decode():
            pass
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
    assert process.returncode == 130
    assert f"job {job} runs on" in err.decode()
    assert (await client.get_workflow_handle(job).describe()).status.name == "RUNNING"
    await end(client, job)


async def test_a_job_that_is_terminated_from_outside(ergo, client, project, worker, store):
    process = await ergo.start("submit", "--wait", "train.py")
    async with asyncio.timeout(DEADLINE_S):
        job = (await process.stdout.readline()).decode().strip()
        await end(client, job)
        _, err = await process.communicate()
    assert process.returncode == 130
    assert "was terminated in Temporal" in err.decode()


@pytest.fixture
def own_server(tmp_path) -> Iterator[Server]:
    server = new_temporal(tmp_path / "temporal")
    server.start()
    yield server
    server.kill()


async def test_a_server_that_goes_away_is_waited_for(ergo, project, own_server):
    ergo.env["TEMPORAL_ADDRESS"] = own_server.address
    client = await Client.connect(own_server.address, data_converter=DATA_CONVERTER)
    async with Worker(client, task_queue=JOB_TASK_QUEUE, workflows=[JobDouble]):
        process = await ergo.start("submit", "--wait", "--no-upload", "-m", "http.server")
        async with asyncio.timeout(DEADLINE_S):
            job = (await process.stdout.readline()).decode().strip()
            while "waiting: " not in (await process.stderr.readline()).decode():
                pass
    own_server.kill()
    async with asyncio.timeout(DEADLINE_S * 2):
        assert (await process.stderr.readline()).decode() == "ergo: Temporal does not answer. Waiting for it.\n"
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
    assert process.returncode == 130
    assert f"job {job} runs on" in err.decode()


SPEC = parse_job_spec({"apiVersion": "ergosphere/v1", "argv": ["python", "x.py"], "ranks": 4, "min_width": 2})


@pytest.mark.parametrize(
    ("devices", "says"),
    [(0, "stays queued"), (1, "stays queued"), (2, "may stay queued"), (3, "may stay queued"), (4, "")],
)
def test_too_few_devices(devices, says):
    text = too_few(SPEC, devices)
    assert says in text
    assert bool(text) == bool(says)


TREE = parse_job_spec({"apiVersion": "ergosphere/v1", "argv": ["x"], "pack": "node", "devices_per_rank": 4})


@pytest.mark.parametrize("by_node", [(), (2,), (3, 3, 3)])
def test_too_few_devices_on_one_node(by_node):
    most = max(by_node, default=0)
    assert too_few(TREE, *by_node).startswith(f"it needs 4 devices on one node, and none has more than {most}")
    assert not too_few(TREE, *by_node, 4)


def test_the_temporal_ui_tells_who_starts_the_ranks():
    assert summary(TREE) == "job: standard, its own ranks, default"
    assert "| devices | 4 on one node |" in details(TREE)


def test_the_temporal_ui_shows_no_values():
    spec = parse_job_spec(
        {"apiVersion": "ergosphere/v1", "argv": ["python", "`x`"], "name": "n" * 128, "environment": {"A": SECRET}}
    )
    assert SECRET not in details(spec)
    assert "| variables | A |" in details(spec)
    assert len(summary(spec).encode()) < 400

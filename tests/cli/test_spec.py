"""From a file and flags to a JobSpec."""

import re

import pytest

from cli.fleet.spec import Flags, SpecError, build_spec, command_line, fresh_job_id, read_job_file
from model.errors import ModelError
from model.ids import JobId

ARGV = ["python", "train.py"]
FILE = {"apiVersion": "ergosphere/v1", "name": "from file", "tier": "basic", "ranks": 2, "argv": ["python", "a.py"]}


def test_flags_alone():
    flags = Flags(tier="premium", ranks=4, min_devices=2, tenant="team-a", priority=3, environment=("A=1", "B=x=y"))
    spec = build_spec({}, flags, ARGV, {"kind": "empty"})
    assert spec.name == "train"
    assert (spec.tier, spec.ranks, spec.min_width, spec.tenant, spec.priority) == ("premium", 4, 2, "team-a", 3)
    assert spec.environment == {"A": "1", "B": "x=y"}
    assert spec.argv == ("python", "train.py")


def test_flags_come_before_the_file():
    file = {**FILE, "environment": {"A": "0", "C": "2"}, "checkpoint": {"keep": 7, "every_s": 60}}
    spec = build_spec(file, Flags(tier="premium", environment=("A=1",), checkpoint_every=30), [], None)
    assert (spec.name, spec.tier, spec.ranks) == ("from file", "premium", 2)
    assert spec.environment == {"A": "1", "C": "2"}
    assert (spec.checkpoint.keep, spec.checkpoint.every_s) == (7, 30)
    assert spec.argv == ("python", "a.py")


def test_a_command_comes_before_that_of_the_file():
    assert build_spec(FILE, Flags(), ARGV, None).argv == ("python", "train.py")


def test_no_periodic_checkpoints():
    assert build_spec({}, Flags(checkpoint_every=0), ARGV, None).checkpoint.every_s is None


def test_every_fault_at_once():
    file = {**FILE, "ranks": 0, "tier": "gold", "nmae": "x", "checkpoint": 3}
    with pytest.raises(ModelError) as caught:
        build_spec(file, Flags(checkpoint_every=None, priority=5000), [], None)
    text = str(caught.value)
    assert "5 faults" in text
    for part in ("`ranks`", "premium", "`priority`", "Did you mean `name`?", "`checkpoint`"):
        assert part in text


def test_an_unknown_tier_names_the_tiers():
    with pytest.raises(ModelError, match="'premium', 'standard' or 'basic'"):
        build_spec({}, Flags(tier="gold"), ARGV, None)


def test_a_variable_without_a_value_is_not_repeated():
    with pytest.raises(SpecError) as caught:
        build_spec({}, Flags(environment=("hunter2",)), ARGV, None)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1, 2]", "not a mapping"),
        ("", "not a mapping"),
        ("a: 1\na: 2", "line 2, column 1, is not YAML: the field a is there twice"),
        ("a: [", "is not YAML"),
        ("a: !!python/object/apply:os.system [x]", "is not YAML"),
    ],
)
def test_a_job_file_that_is_none(tmp_path, text, says):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match=re.escape(says)):
        read_job_file(path)


def test_a_job_file_that_cannot_be_read(tmp_path):
    with pytest.raises(SpecError, match="No such file"):
        read_job_file(tmp_path / "none.yaml")
    (tmp_path / "job.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="UTF-8"):
        read_job_file(tmp_path / "job.yaml")


def test_a_date_in_a_job_file_is_text(tmp_path):
    (tmp_path / "job.yaml").write_text("name: 2026-01-01\nranks: 2\n")
    assert read_job_file(tmp_path / "job.yaml") == {"name": "2026-01-01", "ranks": 2}


def test_json_is_yaml(tmp_path, golden):
    spec = build_spec(read_job_file(golden / "job_spec" / "full.json"), Flags(), [], None)
    assert spec.ranks == 4


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "project" / "pkg").mkdir(parents=True)
    (tmp_path / "project" / "train.py").touch()
    (tmp_path / "project" / "pkg" / "eval.py").touch()
    (tmp_path / "outside.py").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "project"


@pytest.mark.parametrize(
    ("command", "argv"),
    [
        (["train.py", "--steps", "3"], ["python", "train.py", "--steps", "3"]),
        (["pkg/eval.py"], ["python", "pkg/eval.py"]),
        (["./train.py"], ["python", "train.py"]),
        (["project/train.py"], ["python", "train.py"]),  # as the shell completes it
        (["-m", "pkg.eval", "-x"], ["python", "-m", "pkg.eval", "-x"]),
    ],
)
def test_commands(project, command, argv):
    assert command_line(command, project) == argv


def test_an_absolute_script_is_relative_in_the_job(project):
    assert command_line([str(project / "train.py")], project) == ["python", "train.py"]


@pytest.mark.parametrize("directory", [True, False])
def test_a_launcher_may_be_a_program_of_the_nodes(project, directory):
    root = project if directory else None
    for program in ("accelerate", "/opt/no-such-environment/bin/accelerate"):
        assert command_line([program, "launch", "train.py"], root, launcher=True) == [program, "launch", "train.py"]
    (project / "launch").touch()
    inside = [str(project / "launch")]
    assert not directory or command_line(inside, root, launcher=True) == ["python", "launch"]
    with pytest.raises(SpecError, match="outside of the directory"):
        command_line([str(project.parent / "outside.py")], project, launcher=True)
    with pytest.raises(SpecError, match="does not exist"):
        command_line(["/opt/no-such-environment/bin/accelerate"], project)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["missing.py"], "missing.py does not exist"),
        (["pkg"], "pkg is a directory"),
        (["../outside.py"], "outside of the directory"),
        (["outside.py"], "outside of the directory"),
        (["-m"], "name of a module"),
    ],
)
def test_scripts_that_the_job_would_not_find(project, command, says):
    with pytest.raises(SpecError, match=re.escape(says)):
        command_line(command, project)


def test_a_link_out_of_the_directory_is_outside(project):
    (project / "link.py").symlink_to("../outside.py")
    with pytest.raises(SpecError, match="outside of the directory"):
        command_line(["link.py"], project)


@pytest.mark.parametrize("name", ["char GPT", "Ünïcode", "---", "x" * 300, "a.b_c/d", "9"])
def test_ids_of_jobs(name):
    first, second = fresh_job_id(name), fresh_job_id(name)
    assert first != second
    assert JobId(first) == first
    assert len(first) <= 47


@pytest.mark.parametrize(
    ("command", "argv", "name"),
    [
        (["torchrun", "--nproc-per-node", "2", "train.py", "-x"], None, "train"),
        (["accelerate", "launch", "pkg/eval.py"], None, "eval"),
        (["deepspeed"], None, "deepspeed"),
        (["python", "train.py"], None, "train"),
        (["train.py"], ["python", "train.py"], "train"),
        (["-m", "torch.distributed.run", "train.py"], ["python", "-m", "torch.distributed.run", "train.py"], None),
    ],
)
def test_what_starts_its_own_ranks_may_be_a_program_of_the_nodes(project, command, argv, name):
    found = command_line(command, project, launcher=True)
    assert found == (argv or command)
    spec = build_spec({}, Flags(pack="node", devices=2), found, None)
    assert (spec.pack, spec.world_size, spec.min_width) == ("node", 2, 2)
    assert spec.name == (name or "torch.distributed.run")


def test_a_launcher_is_none_of_the_directory(project):
    for command in (["pkg"], ["./torchrun"], ["pkg/none.py"]):
        with pytest.raises(SpecError, match=r"does not exist|is a directory"):
            command_line(command, project, launcher=True)


@pytest.mark.parametrize(
    ("file", "flags", "says"),
    [
        ({}, Flags(devices=2), "Add --pack node"),
        ({"pack": "rank"}, Flags(devices=2), "Add --pack node"),
        ({}, Flags(pack="tree"), "'rank' or 'node'"),
        ({}, Flags(pack="node", ranks=2), "is started once"),
        ({}, Flags(pack="node", devices=2, min_devices=1), "2 devices for life"),
        ({}, Flags(pack="node", devices=0), "must be at least 1"),
    ],
)
def test_shapes_that_no_job_has(file, flags, says):
    with pytest.raises((SpecError, ModelError)) as caught:
        build_spec({"apiVersion": "ergosphere/v1", **file}, flags, ARGV, None)
    assert says in str(caught.value)

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from model.job_spec import JobSpec, Secret, parse_job_spec
from proxy_runtime.node.environment import command, resolve
from proxy_runtime.node.errors import NodeError

HERE = {"HOME": "/home/x", "LANG": "de_DE.UTF-8", "SECRET_OF_NODE": "s3", "LD_PRELOAD": "no.so"}


def spec(**fields: object) -> JobSpec:
    return parse_job_spec({"apiVersion": "ergosphere/v1", "argv": ["python", "train.py"], **fields})


def test_python_is_the_one_of_this_installation_and_little_is_inherited() -> None:
    made = command(spec(environment={"SEED": "7"}), python=sys.executable, surroundings=HERE)
    assert made.argv == (sys.executable, "train.py")
    assert made.env.pop("PATH").split(":")[0] == str(Path(sys.executable).parent)
    assert made.env == {"HOME": "/home/x", "LANG": "de_DE.UTF-8", "SEED": "7"}


def test_a_variable_of_the_job_overrules_the_node() -> None:
    assert command(spec(environment={"LANG": "C"}), surroundings=HERE).env["LANG"] == "C"


def test_a_secret_is_in_the_processes_and_nowhere_else() -> None:
    made = command(spec(secrets=[{"variable": "TOKEN", "reference": "env:SECRET_OF_NODE"}]), surroundings=HERE)
    assert made.whole_env["TOKEN"] == "s3"
    assert "TOKEN" not in made.env and "s3" not in repr(made)


def test_a_secret_from_a_file_loses_its_last_line_end(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("abc\n")
    assert resolve(Secret(variable="T", reference=f"file:{tmp_path / 'token'}")) == "abc"


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("vault:secret/x", "'vault', which does not exist"),
        ("env:MISSING", "MISSING, which this node does not have"),
        ("file:/does/not/exist", "No such file"),
        ("file:relative", "not an absolute path"),
    ],
)
def test_a_secret_that_cannot_be_had_says_why(reference: str, words: str) -> None:
    with pytest.raises(NodeError, match=words) as caught:
        resolve(Secret(variable="T", reference=reference), HERE)
    assert caught.value.code == "runtime.unsuitable"


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(NodeError, match="no-such-program") as caught:
        command(spec(argv=["no-such-program"]), surroundings=HERE)
    assert caught.value.code == "runtime.unsuitable"

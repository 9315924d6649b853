"""Every field of a job file with every absurd value: one error that names the field, or a value known to be fine."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from cli.fleet.spec import Flags, SpecError, build_spec, read_job_file
from model.errors import ModelError
from model.job_spec import JobSpec, parse_submitted_spec

FULL: dict[str, Any] = {
    "apiVersion": "ergosphere/v1", "name": "n", "tenant": "t", "tier": "basic", "priority": 1,
    "argv": ["python", "a.py"], "volume": {"kind": "path", "path": "/data"}, "environment": {"A": "1"},
    "secrets": [{"variable": "B", "reference": "file:b"}], "ranks": 2, "pack": "rank", "devices_per_rank": 1,
    "accelerator": "cpu", "host_memory_bytes": "1GiB", "device_memory_bytes": 5, "min_width": 1, "max_width": 2,
    "retries": {"failure": 1, "no_progress": 1},
    "checkpoint": {"every_s": 60, "keep": 2, "cut": "step", "step_deadline_s": 1.5}, "device_time_limit_s": 100,
    "network": "host", "on_lost_lease": "run", "after": [{"job": "j-1", "ended": "any"}],
}  # fmt: skip
# As they are written in YAML; among them what reads as something else than it looks like.
ABSURD = {
    "null": "null", "yes": "yes", "-1": "-1", "0": "0", "1.5": "1.5", "nan": ".nan", "inf": "-.inf", "1e400": "1e400",
    "large": str(1 << 62), "huge": "1" + "0" * 30, "longer": "9" * 5000, "word": "x", "empty": '""',
    "zero byte": '"a\\0"', "surrogate": '"\\ud800"',
    "long": "x" * 5_000, "[]": "[]", "{}": "{}", "[[1]]": "[[1]]", "{a: 1}": "{a: 1}", "{1: 1}": "{1: 1}",
    "date": "2026-01-01",
    "sixty": "190:20:30", "binary": "!!binary aGk=", "set": "!!set {a, b}", "!!int x": "!!int x",
    "!!bool x": "!!bool x", "!!timestamp x": "!!timestamp x", "0b_": "0b_", "python": "!!python/name:os.system",
    "alias": "*nothing", "itself": "&a [*a]",
}  # fmt: skip
NUMBER = {"sixty"}  # base 60, as YAML has it
TEXT = {"word", "date", "1e400"}
NONE = {"null"}
LARGE = {"large"}  # as good as none
FINE: dict[str, set[str]] = {
    "name": TEXT, "tenant": {"word", "date", "1e400"}, "priority": {"-1", "0"}, "argv[0]": TEXT, "volume.path": set(),
    "environment.A": TEXT | {"empty", "long"}, "environment": {"{}"}, "secrets": {"[]"}, "accelerator": TEXT | NONE,
    "host_memory_bytes": NONE | NUMBER | LARGE, "device_memory_bytes": NONE | NUMBER | LARGE,
    "max_width": NONE, "retries": {"{}"},
    "checkpoint": {"{}"}, "retries.failure": {"0"}, "retries.no_progress": {"0"},
    "checkpoint.every_s": NONE | NUMBER | LARGE,
    "checkpoint.step_deadline_s": {"1.5"}, "device_time_limit_s": NONE | NUMBER | LARGE,
    "after": {"[]"}, "after[0].job": TEXT,
    "ranks": NUMBER, "secrets[0].variable": {"word"},
}  # fmt: skip


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items)[:1] if isinstance(value, list) else items:
        yield from places(item, (*path, key))


def name_of(path: tuple[str | int, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:]


def with_value(path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    document = copy.deepcopy(FULL)
    at: Any = document
    for part in path[:-1]:
        at = at[part]
    at[path[-1]] = value
    return document


def read(folder, text: str) -> JobSpec:
    file = folder / "job.yaml"
    file.write_text(text)
    return build_spec(read_job_file(file), Flags(), [], None)


@pytest.fixture(scope="module")
def absurd(tmp_path_factory) -> dict[str, Any]:
    """What YAML makes of them; what it refuses is refused with its place in the file, wherever it stands."""
    file, found = tmp_path_factory.mktemp("files") / "job.yaml", {}
    for label, text in ABSURD.items():
        file.write_text(f"ranks: 1\nvalue: {text}\n")
        try:
            found[label] = read_job_file(file)["value"]
        except SpecError as error:
            assert error.code == "submit.file" and "line 2, column " in error.message, label
    # The longest integers are none to Python; the others are what a tag or a form says in vain.
    assert set(ABSURD) - set(found) == {"longer", "!!int x", "!!bool x", "!!timestamp x", "0b_", "python", "alias"}
    return found


def test_every_field_is_swept():
    assert set(FULL) == set(JobSpec.json_schema()["properties"])


@pytest.mark.parametrize("path", list(places(FULL)), ids=name_of)
def test_a_field_with_an_absurd_value(path, absurd):
    name = name_of(path)
    fine = set()
    for label, value in absurd.items():
        try:
            parse_submitted_spec(with_value(path, value))
        except ModelError as error:
            assert error.faults and all(fault.what and fault.remedy for fault in error.faults), (label, error)
            wheres = [fault.where for fault in error.faults]
            # Of a field that others depend on these may be told, too.
            assert any(where.startswith((name, name.rpartition(".")[0] or name)) for where in wheres), (label, error)
            assert len(str(error)) < 1000, label
        else:
            fine.add(label)
    assert fine == FINE.get(name, set())


@pytest.mark.parametrize("path", [(), *places(FULL)], ids=name_of)
def test_an_unknown_field(path):
    at: Any = FULL
    for part in path:
        at = at[part]
    if not isinstance(at, dict) or path == ("environment",):
        return
    with pytest.raises(ModelError) as caught:
        parse_submitted_spec(with_value((*path, "nonsense"), 1))
    (fault,) = caught.value.faults
    assert fault.where == name_of((*path, "nonsense")) and "not a known field" in fault.what


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 500, "nested too deeply"),
        ("a: " + "[" * 80 + "]" * 80, "nested more than"),
        ("a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
            f"{after}: &{after} [{', '.join([f'*{before}'] * 9)}]\n"
            for before, after in zip("abcdefg", "bcdefgh", strict=True)
        ), "more than 100,000 values"),
        ("? [a]\n: 1", "unhashable"),
        ("1: a", "called 1, which is no string"),
        ("environment: {on: x}", "`environment` has a field that is called True"),
        ("\x01", "is not YAML"),
        ("x" * (17 << 20), "more than 16 MiB"),
    ],
    ids=["brackets", "deep", "laughs", "list as a name", "number as a name", "a word that is none", "control", "large"],
)  # fmt: skip
def test_files_that_are_none(text, says, tmp_path):
    with pytest.raises((SpecError, ModelError)) as caught:
        read(tmp_path, text)
    assert says in str(caught.value) and len(str(caught.value)) < 2000


def test_a_file_without_an_end():
    from pathlib import Path

    with pytest.raises(SpecError, match="more than 16 MiB"):
        read_job_file(Path("/dev/zero"))

"""Builds of the runtime: a small tree of sources through the real compiler, and the errors before it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from proxy_runtime import build
from proxy_runtime.building import interpreter as interpreters
from proxy_runtime.building.errors import BuildError
from proxy_runtime.building.native import Target, find_compiler
from proxy_runtime.building.sources import Sources

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="needs the CUDA build of torch")

_HERE = Path(build.__file__).parent


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ERGO_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with the layout of the real one, whose C++ compiles in a second."""
    root = tmp_path / "proxy_runtime"
    for folder in ("channel", "rank/native", "rank/ergo_rank", "device/native", "process"):
        (root / folder).mkdir(parents=True)
    (root / "channel/word.hpp").write_text("#pragma once\ninline int word() { return 7; }\n")
    function = (
        '#include "word.hpp"\nextern "C" __attribute__((visibility("default"))) int answer() { return word(); }\n'
    )
    (root / "rank/native/a.cpp").write_text(function)
    (root / "device/native/b.cpp").write_text(function)
    (root / "rank/native/channel_map.c").write_text(
        '__attribute__((visibility("default"))) int mapped(void) { return 1; }\n'
    )
    (root / "rank/ergo_rank/__init__.py").write_text("def autoload() -> None: ...\n")
    (root / "rank/sitecustomize.py").write_text("")
    shutil.copyfile(_HERE / "process/init.c", root / "process/init.c")
    monkeypatch.setattr(Sources, "of_this_tree", classmethod(lambda cls: cls.at(root)))
    return root


def test_a_build_has_all_its_parts_and_no_trace_of_its_making(home: Path, tree: Path) -> None:
    lines: list[str] = []
    made = build.ensure(progress=lines.append)
    assert made.root == home / "builds" / made.id and len(made.id) == 32
    assert made.torch_version == torch.__version__
    assert (made.rank_dir / "sitecustomize.py").is_file()
    assert (made.rank_dir / "ergo_rank/_interposer.so").is_file()
    assert (made.rank_dir / "ergo_rank/_channel.so").is_file()
    assert (made.rank_dir / "stubs/ergo_cudart.so.13").is_file()
    assert (made.device_dir / "_ergo_device.so").is_file()
    assert os.access(made.init_binary, os.X_OK)
    assert sorted(p.name for p in made.root.iterdir()) == ["build.json", "device", "ergo-init", "rank"]
    assert [p.name for p in (home / "builds").iterdir() if p.name.startswith(".new")] == []
    assert any("compiled" in line and "a.cpp" in line for line in lines)
    about = json.loads((made.root / "build.json").read_text())
    assert about["id"] == made.id and about["compiler"] == find_compiler().version

    found = subprocess.run(
        [sys.executable, "-c", "from importlib.metadata import entry_points as e; print(e(group='torch.backends'))"],
        env={"PYTHONPATH": str(made.rank_dir)}, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert "ergo_rank:autoload" in found
    before = set(made.root.rglob("*"))
    subprocess.run([sys.executable, "-c", "import ergo_rank"], env={"PYTHONPATH": str(made.rank_dir)}, check=True)
    assert set(made.root.rglob("*")) == before, "importing in a rank changed the build"

    again: list[str] = []
    assert build.ensure(progress=again.append) == made and again == []
    assert build.load(made.root) == made and build.by_id(made.id) == made and build.list_builds() == (made,)


def test_a_changed_source_makes_another_build_and_keeps_the_old_one(home: Path, tree: Path) -> None:
    first = build.ensure()
    (tree / "device/native/b.cpp").write_text("int other() { return 1; }\n")
    lines: list[str] = []
    second = build.ensure(progress=lines.append)
    assert second.id != first.id and set(build.list_builds()) == {first, second}
    compiled = [line for line in lines if line.startswith("compiled") and ".cpp" in line]
    assert len(compiled) == 1 and "b.cpp" in compiled[0], "unchanged files come from the cache"
    assert build.prune([second.id]) == (first.id,)
    assert build.list_builds() == (second,) and not first.root.exists()


def test_concurrent_builders_make_one_build(home: Path, tree: Path) -> None:
    lines: list[str] = []
    results: list[build.Build] = []
    threads = [threading.Thread(target=lambda: results.append(build.ensure(progress=lines.append))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(results) == 3 and len(set(results)) == 1
    assert sum("is complete" in line for line in lines) == 1


def test_a_failing_compile_is_one_sentence_and_leaves_nothing(home: Path, tree: Path) -> None:
    (tree / "rank/native/a.cpp").write_text("int broken( {\n")
    with pytest.raises(BuildError) as caught:
        build.ensure()
    assert caught.value.code == "build.compile" and "a.cpp" in caught.value.message
    assert "\n" not in str(caught.value)
    assert [p for p in (home / "builds").iterdir() if not p.name.startswith(".lock")] == []


def test_what_a_killed_builder_left_is_removed(home: Path, tree: Path) -> None:
    made = build.ensure()
    shutil.move(made.root, made.root.with_name(f".new-{made.id}-1"))
    assert build.list_builds() == ()
    assert build.ensure() == made
    assert not made.root.with_name(f".new-{made.id}-1").exists()


def test_missing_sources_are_an_error_and_can_be_left_out_in_development(home: Path, tree: Path) -> None:
    shutil.rmtree(tree / "device")
    with pytest.raises(BuildError) as caught:
        build.ensure()
    assert caught.value.code == "build.sources-missing" and "device/native" in caught.value.message
    assert (build.ensure(partial=True).rank_dir / "ergo_rank/_interposer.so").is_file()


def test_full_disk(home: Path, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(BuildError) as caught:
        build.ensure()
    assert caught.value.code == "build.no-space" and "ERGO_HOME" in caught.value.remedy


def test_no_compiler(home: Path, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build.ensure()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.ensure() == made, "a build that is there needs no compiler"
    build.prune([])
    with pytest.raises(BuildError) as caught:
        build.ensure()
    assert caught.value.code == "build.no-compiler" and "apt-get install g++" in caught.value.remedy


def test_damaged_and_unknown_builds(home: Path, tree: Path) -> None:
    made = build.ensure()
    (made.device_dir / "_ergo_device.so").unlink()
    with pytest.raises(BuildError) as caught:
        build.load(made.root)
    assert caught.value.code == "build.damaged" and "_ergo_device.so" in caught.value.message
    for name in ("0" * 32, "../builds"):
        with pytest.raises(BuildError) as caught:
            build.by_id(name)
        assert caught.value.code == "build.unknown"


def answer(**changes: object) -> dict[str, object]:
    return {
        "executable": "/venv/bin/python", "version": [3, 11, 7], "implementation": "cpython", "abi": "cpython-311",
        "include": "/include", "path": [], "torch": "/venv/torch", "torch_version": "2.15.0+cu132", "cuda": "13.2",
    } | changes  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"version": [3, 10, 1]}, "build.python-version", "3.10.1"),
        ({"implementation": "pypy"}, "build.python-version", "pypy"),
        ({"torch": None}, "build.torch-missing", "has no torch"),
        ({"torch_version": "2.10.0+cu128"}, "build.torch-version", "2.11 to 2.15"),
        ({"torch_version": "2.16.0"}, "build.torch-version", "2.16.0"),
        ({"torch_version": "2.15.0+cpu", "cuda": ""}, "build.torch-cpu-only", "CPU-only"),
    ],
)
def test_interpreters_that_cannot_run_ranks(changes: dict[str, object], code: str, says: str) -> None:
    with pytest.raises(BuildError) as caught:
        interpreters._checked(answer(**changes))
    assert caught.value.code == code and says in caught.value.message and caught.value.remedy


@pytest.mark.parametrize("version", ["2.11.0", "2.13.1+cu130", "2.15.0+cu132"])
def test_versions_that_can(version: str) -> None:
    assert interpreters._checked(answer(torch_version=version)).torch_version == version


def test_no_interpreter_there(tmp_path: Path) -> None:
    with pytest.raises(BuildError) as caught:
        interpreters.query(str(tmp_path / "python"))
    assert caught.value.code == "build.python-missing"
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho boom >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(BuildError) as caught:
        interpreters.query(str(broken))
    assert caught.value.code == "build.python-missing" and "boom" in caught.value.message


def test_this_interpreter_is_asked_without_importing_torch() -> None:
    found = interpreters.query(sys.executable)
    assert found.torch_version == torch.__version__ and (found.include / "Python.h").is_file()


def test_targets_without_sources_are_left_out(tmp_path: Path) -> None:
    names = [t.name for t in build._targets(Sources.at(tmp_path))]
    assert names == [] and isinstance(Target("x", (), "x.so"), Target)


def test_command_line_prints_the_directory_and_one_sentence_on_failure(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "proxy_runtime.build", "--python", str(tmp_path / "none")],
        capture_output=True, text=True, cwd=_HERE.parent, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1

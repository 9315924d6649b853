"""Finding, installing and proving a CRIU, and the doctor's checks."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from proxy_runtime.process import checks, criu_binary, criu_setup, debian
from proxy_runtime.process import self_test as self_test_module
from proxy_runtime.process.criu_errors import CriuError, error_lines, explain


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def fake_criu(path: Path, version: str) -> Path:
    return script(path, f"echo Version: {version}")


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """An empty ERGO_HOME, and no CRIU on the machine."""
    monkeypatch.setenv("ERGO_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("ERGO_CRIU", raising=False)
    real = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, **options: None if name == "criu" else real(name, **options))
    return tmp_path / "home"


def on_path(monkeypatch, path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, **_: str(path))


def test_the_one_named_wins(home, tmp_path, monkeypatch):
    fake_criu(home / "criu" / "criu", "9.0")
    monkeypatch.setenv("ERGO_CRIU", str(fake_criu(tmp_path / "mine", "5.1.2")))
    found = criu_setup.find(install=False)
    assert (found.path, found.version, found.prefix) == (tmp_path / "mine", (5, 1, 2), None)


@pytest.mark.parametrize(("version", "code"), [("3.17.1", "criu.too-old"), (None, "criu.not-found")])
def test_the_one_named_must_work(home, tmp_path, monkeypatch, version, code):
    path = fake_criu(tmp_path / "mine", version) if version else script(tmp_path / "mine", "exit 1")
    monkeypatch.setenv("ERGO_CRIU", str(path))
    with pytest.raises(CriuError) as caught:
        criu_setup.find()
    assert caught.value.code == code
    assert caught.value.remedy


def test_the_machines_own_comes_before_the_private_one(home, tmp_path, monkeypatch):
    fake_criu(home / "criu" / "criu", "9.0")
    on_path(monkeypatch, fake_criu(tmp_path / "criu", "8.0"))
    assert criu_setup.find(install=False).version == (8, 0, 0)


def test_one_that_is_too_old_is_passed_over(home, tmp_path, monkeypatch):
    on_path(monkeypatch, fake_criu(tmp_path / "criu", "3.17.1"))
    with pytest.raises(CriuError) as caught:
        criu_setup.find(install=False)
    assert caught.value.code == "criu.not-found"
    fake_criu(home / "criu" / "criu", "9.0")
    found = criu_setup.find(install=False)
    assert (found.version, found.prefix) == ((9, 0, 0), home / "criu")


@pytest.mark.parametrize(
    ("kernel", "needed"),
    [
        ("5.16.0", (4, 0, 0)),
        ("6.12.9", (4, 0, 0)),
        ("6.13-rc1", (4, 1, 0)),
        ("6.16.1", (4, 2, 0)),
        ("7.0.0", (4, 2, 0)),
    ],
)
def test_what_a_kernel_needs(kernel, needed):
    assert criu_binary.needed_version(criu_binary.kernel_version(kernel)) == needed


def test_installing_falls_back_to_the_next_suite(home, monkeypatch):
    tried = []

    def unpack(package: str, suite: str, target: Path, work: Path) -> None:
        tried.append(suite)
        if suite == "forky":
            raise debian.DebianError("no such suite")
        fake_criu(target / "usr/sbin/criu", "9.1.0")
        script(target / "usr/lib/arch/ld-linux-x.so.2", 'shift 2; exec "$@"')

    monkeypatch.setattr(debian, "unpack", unpack)
    said = []
    found = criu_setup.find(said.append)
    assert tried == ["forky", "sid"]
    assert len(said) == 2
    assert (found.version, found.path) == ((9, 1, 0), home / "criu" / "criu")
    assert sorted(os.listdir(home)) == ["criu", "criu.lock"]
    assert criu_setup.find(said.append) == found
    assert len(said) == 2


def test_an_installation_that_does_not_run_leaves_what_was_there(home, monkeypatch):
    fake_criu(home / "criu" / "criu", "3.0")

    def unpack(package: str, suite: str, target: Path, work: Path) -> None:
        script(target / "usr/sbin/criu", "exit 1")
        script(target / "usr/lib/arch/ld-linux-x.so.2", "exit 1")

    monkeypatch.setattr(debian, "unpack", unpack)
    with pytest.raises(CriuError, match="does not run") as caught:
        criu_setup.find()
    assert caught.value.code == "criu.install"
    left = criu_binary.probe(home / "criu" / "criu")
    assert left is not None
    assert left.version == (3, 0, 0)


def test_mirrors_of_the_machine(tmp_path):
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text(
        "# deb http://old.test/debian x main\ndeb [arch=amd64] http://a.test/debian/ x main\n"
    )
    (tmp_path / "sources.list.d" / "b.sources").write_text(
        "Types: deb\nURIs: http://b.test/debian http://a.test/debian\nSuites: x\n\nURIs: http://b.test/debian-security\n"
    )
    (tmp_path / "sources.list.d" / "c.list").write_text("deb http://c.test/other x main\n")
    assert debian.mirrors(tmp_path) == ["http://a.test/debian", "http://b.test/debian"]


@pytest.mark.slow
def test_debians_newest_can_be_unpacked(home, init_binary):
    if not debian.mirrors():
        pytest.skip("this machine has no Debian archive in its apt configuration")
    found = criu_setup.find()
    assert found.prefix == home / "criu"
    criu_setup.self_test(found, init_binary)


def test_the_self_test_passes_and_is_remembered(criu, init_binary, home, monkeypatch):
    criu_setup.self_test(criu, init_binary)
    assert len(self_test_module._remembered(home / "criu-self-test.json")) == 1

    def never(*_: object) -> None:
        raise AssertionError("not remembered")

    monkeypatch.setattr(self_test_module, "_round_trip", never)
    criu_setup.self_test(criu, init_binary)
    with pytest.raises(AssertionError):
        criu_setup.self_test(criu, init_binary, cached=False)


def test_the_self_test_fails_for_a_tool_that_is_none(home, tmp_path, init_binary):
    fake = criu_binary.probe(fake_criu(tmp_path / "criu", "9.0"))
    assert fake is not None
    with pytest.raises(CriuError):
        criu_setup.self_test(fake, init_binary)
    assert not (home / "criu-self-test.json").exists()


def test_the_doctor_finds_this_machine_well(criu, init_binary, monkeypatch):
    monkeypatch.setenv("ERGO_CRIU", str(criu.path))
    found = {check.name: check for check in criu_setup.checks(sys.executable, init_binary)}
    assert list(found) == [
        "privileges", "kernel", "compiler", "disk space", "Python", "torch", "overlayfs", "CRIU", "CRIU self-test",
    ]  # fmt: skip
    assert [check for check in found.values() if not check.ok] == []


def test_the_doctor_says_what_is_lacking(tmp_path, monkeypatch, home, init_binary):
    assert not checks.kernel("5.15.3").ok
    assert checks.kernel("5.16.0").ok
    monkeypatch.setattr(checks, "FREE_BYTES", 1 << 60)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(checks.proc, "status_field", lambda pid, name: f"{~(1 << 21) & (1 << 41) - 1:x}")
    lacking = [checks.privileges(), checks.disk(tmp_path / "no" / "such")]
    lacking += checks.interpreter(str(tmp_path / "python"))
    lacking += checks.interpreter(str(script(tmp_path / "old", "echo '[[3, 9, 1], [\"2.1.0+cpu\"]]'")))
    lacking += checks.criu_checks(lambda: criu_setup.find(install=False), init_binary)
    assert [(check.name, check.ok) for check in lacking] == [
        (name, False) for name in ("privileges", "disk space", "Python", "Python", "torch", "CRIU")
    ]
    assert "CAP_SYS_ADMIN" in lacking[0].detail
    assert all(check.remedy for check in lacking)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("(00.01) Error (criu/vdso.c:1): vdso: Unexpected rt vDSO area bounds", "criu.too-old"),
        ("(00.01) Error (criu/sockets.c:1): sockets: Can't get 1:16 opt: Operation not supported", "criu.too-old"),
        ("(00.01)   77: Error (criu/files-reg.c:1): File job/log has bad size 5 (expect 3)", "criu.file-differs"),
        ("(00.01) Error (criu/cr-restore.c:1): Can't fork for 1000: File exists", "criu.pid-in-use"),
        ("(00.01) Error (criu/seize.c:1): Zombies with threads are not supported", "criu.exiting"),
        (
            "(00.01) Error (criu/files-reg.c:1): Can't link remap to /job/a b.pt: Invalid cross-device link",
            "criu.replaced-file",
        ),
        ("(00.01) Error (criu/mem.c:1): Something nobody has seen", "criu.failed"),
    ],
)
def test_log_lines_become_sentences(tmp_path, line, code):
    log = tmp_path / "log"
    log.write_text(
        f"(00.00) Error (criu/util.c:1): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted\n{line}\n"
    )
    lines = error_lines(log)
    assert len(lines) == 1
    error = explain(lines, "rank 3 could not be dumped")
    assert error.code == code
    assert error.message.startswith("rank 3 could not be dumped: ")
    assert error.message.endswith(".")
    assert "Error (" not in error.message


def test_no_log_is_an_error_too(tmp_path):
    assert explain(error_lines(tmp_path / "none"), "x").code == "criu.failed"

"""Unpacking a Debian package and what it needs into a directory, with an apt of its own. The system is untouched."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_KEYRING: Final = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_USELESS: Final = ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/i18n", "usr/share/lintian")


class DebianError(Exception):
    """The package could not be had; the text says why."""


def unpack(package: str, suite: str, target: Path, work: Path) -> None:
    """Downloads `package` and its dependencies (checked by apt against Debian's keys) and unpacks them.

    Args:
        package: binary package.
        suite: Debian suite, e.g. ``sid``.
        target: directory that is made.
        work: directory for apt's state.

    Raises:
        DebianError: no apt, no keyring, no mirror, no network, no space.
    """
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise DebianError(f"{tool} is not installed")
    if not _KEYRING.exists():
        raise DebianError("Debian's keys are not installed (package debian-archive-keyring)")
    environment = _private_apt(suite, work)
    _run(["apt-get", "-q", "update"], environment, work)
    plan = _run(["apt-get", "install", "-s", package], environment, work)
    packages = [f"{match[1]}={match[2]}" for match in re.finditer(r"^Inst (\S+) \((\S+)", plan, re.MULTILINE)]
    if not packages:
        raise DebianError(f"{package} is not in it")
    downloads = work / "debs"
    downloads.mkdir()
    _run(["apt-get", "-q", "download", *packages], environment, downloads)
    target.mkdir(parents=True)
    for archive in sorted(downloads.glob("*.deb")):
        _run(["dpkg-deb", "-x", str(archive), str(target)], environment, work)
    for path in _USELESS:
        shutil.rmtree(target / path, ignore_errors=True)


def wrap(tree: Path, prefix: Path, program: str, wrapper: Path) -> None:
    """Writes a script that runs `program` with the libraries unpacked beside it.

    Args:
        tree: where it was unpacked.
        prefix: where `tree` will finally be.
        program: path below both.
        wrapper: the script to write.

    Raises:
        DebianError: the program or its loader is not there.
    """
    loaders = sorted(tree.glob("usr/lib/*/ld-linux-*.so.*")) + sorted(tree.glob("lib/*/ld-linux-*.so.*"))
    if not loaders or not (tree / program).exists():
        raise DebianError(f"{program} or its loader is not in the packages")
    loader = prefix / loaders[0].relative_to(tree)
    libraries = shlex.quote(str(loader.parent))
    wrapper.write_text(
        "#!/bin/sh\n"
        f'exec {shlex.quote(str(loader))} --library-path {libraries} {shlex.quote(str(prefix / program))} "$@"\n'
    )
    wrapper.chmod(0o755)


def mirrors(root: Path = Path("/etc/apt")) -> list[str]:
    """Addresses of Debian archives that this machine is configured for, in order, without security archives."""
    found: list[str] = []
    for uri in _configured(root):
        bare = uri.rstrip("/")
        if bare.endswith("/debian") and bare not in found:
            found.append(bare)
    return found


def _configured(root: Path) -> Iterator[str]:
    files = [root / "sources.list", *sorted((root / "sources.list.d").glob("*"))]
    for path in files:
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            old = re.match(r"deb\s+(?:\[[^\]]*\]\s+)?(\S+)", line)
            new = re.match(r"URIs:\s*(.+)", line)
            if old and path.suffix == ".list":
                yield old[1]
            elif new and path.suffix == ".sources":
                yield from new[1].split()


def _private_apt(suite: str, work: Path) -> dict[str, str]:
    configured = mirrors()
    if not configured:
        raise DebianError("this machine has no Debian archive in its apt configuration")
    for part in ("lists/partial", "cache/archives/partial"):
        (work / part).mkdir(parents=True)
    (work / "status").touch()
    (work / "sources.list").write_text(f"deb [signed-by={_KEYRING}] {configured[0]} {suite} main\n")
    settings = {
        "Dir::Etc::sourcelist": work / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Etc::preferences": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
        "Dir::State": work,
        "Dir::State::lists": work / "lists",
        "Dir::State::status": work / "status",
        "Dir::Cache": work / "cache",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "root",
    }
    configuration = work / "apt.conf"
    configuration.write_text("".join(f'{name} "{value}";\n' for name, value in settings.items()))
    return {**os.environ, "APT_CONFIG": str(configuration), "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}


def _run(command: list[str], environment: dict[str, str], directory: Path) -> str:
    try:
        result = subprocess.run(
            command, env=environment, cwd=directory, capture_output=True, text=True, timeout=300, check=False
        )
    except subprocess.TimeoutExpired:
        raise DebianError(f"{command[0]} did not finish within 5 minutes") from None
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if line.startswith("E:")] or result.stderr.splitlines()
        raise DebianError(f"{command[0]}: {lines[0].removeprefix('E: ') if lines else result.returncode}")
    return result.stdout

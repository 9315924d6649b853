"""Java and the broker's jars. The jars are kept once per machine and version, under `$ERGO_HOME/kafka`."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from proxy_runtime.errors import ErgoError
from proxy_runtime.home import ergo_home

JAVA_RELEASE = 17
"""The oldest Java that a broker runs on."""

_POM = Path(__file__).with_name("pom.xml")
_MAVEN_S = 900.0
_NEEDED_BYTES = 200 << 20


def java() -> Path:
    """A Java that can run a broker: that of `$JAVA_HOME`, else the first on the path.

    Raises:
        ErgoError: ``kafka.no-java``, ``kafka.old-java``.
    """
    home = os.environ.get("JAVA_HOME")
    candidate = Path(home, "bin", "java") if home else None
    found = str(candidate) if candidate and candidate.is_file() else shutil.which("java")
    remedy = (
        f"Install a Java runtime from {JAVA_RELEASE} on (Debian: apt-get install openjdk-17-jre-headless), or point "
        "ERGO_KAFKA_BOOTSTRAP_SERVERS to a Kafka that is there."
    )
    if found is None:
        raise ErgoError("Kafka needs Java, and there is none on the path.", code="kafka.no-java", remedy=remedy)
    try:
        answer = subprocess.run([found, "-version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ErgoError(f"{found} does not run: {error}.", code="kafka.no-java", remedy=remedy) from error
    version = re.search(r'version "(?:1\.)?(\d+)', answer.stderr)
    if version and int(version[1]) < JAVA_RELEASE:
        raise ErgoError(
            f"{found} is Java {version[1]}, and Kafka needs {JAVA_RELEASE}.", code="kafka.old-java", remedy=remedy
        )
    return Path(found)


def version() -> str:
    """The version of Kafka that `pom.xml` names."""
    found = re.search(r"<kafka\.version>([^<]+)</kafka\.version>", _POM.read_text())
    assert found, "pom.xml names no version of Kafka"
    return found[1]


def folder() -> Path:
    """Where this machine keeps the jars that `pom.xml` names; another pom.xml has another folder."""
    return ergo_home() / "kafka" / f"{version()}-{hashlib.sha256(_POM.read_bytes()).hexdigest()[:8]}"


def installed() -> bool:
    """Whether the jars are there."""
    return folder().is_dir()


def jars(say: Callable[[str], None] = lambda _: None) -> Path:
    """The folder with the jars; brings them from Maven Central the first time.

    The folder is whole or not there: it is filled under another name. Two processes may do so at once.

    Raises:
        ErgoError: ``kafka.no-maven``, ``kafka.download``, ``kafka.no-space``.
    """
    place = folder()
    if place.is_dir():
        return place
    maven = shutil.which("mvn")
    if maven is None:
        raise ErgoError(
            "Kafka's jars are not on this machine yet, and there is no `mvn` on the path to bring them.",
            code="kafka.no-maven",
            remedy="Install Maven (Debian: apt-get install maven), or set ERGO_KAFKA_BOOTSTRAP_SERVERS.",
        )
    java()
    place.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(place.parent).free < _NEEDED_BYTES:
        raise ErgoError(
            f"{place.parent} has less than {_NEEDED_BYTES >> 20} MiB left for Kafka's jars.",
            code="kafka.no-space",
            remedy="Free some there, or set ERGO_HOME to a folder on another disk.",
        )
    say(f"Bringing Apache Kafka {version()} from Maven Central (about 45 MB, once) ...")
    with tempfile.TemporaryDirectory(prefix=".new-", dir=place.parent) as draft:
        libs = Path(draft, "libs")
        _copy_dependencies(maven, libs)
        try:
            libs.rename(place)
        except OSError:
            if not place.is_dir():  # else: somebody else has brought the same
                raise
    return place


def _copy_dependencies(maven: str, libs: Path) -> None:
    # The pom is not in a project of the user's: Maven must not look for a parent, nor write a target folder there.
    words = ["-q", "-B", "-f", str(_POM), "dependency:copy-dependencies", "-DincludeScope=runtime"]
    try:
        done = subprocess.run(
            [maven, *words, f"-DoutputDirectory={libs}"],
            capture_output=True,
            text=True,
            timeout=_MAVEN_S,
            cwd=libs.parent,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise _download_error(f"it took more than {_MAVEN_S:.0f} s") from error
    if done.returncode == 0 and any(libs.glob("kafka_*.jar")):
        return
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "ERROR" in line]
    raise _download_error(re.sub(r"\x1b\[[0-9;]*m|\[ERROR\] *", "", lines[0])[:300] if lines else "Maven said nothing")


def _download_error(why: str) -> ErgoError:
    return ErgoError(
        f"Kafka's jars could not be brought from Maven Central: {why}.",
        code="kafka.download",
        remedy="Check the network and Maven's settings.xml (mirror, proxy), and try again.",
    )

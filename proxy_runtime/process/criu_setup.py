"""Finding a CRIU that works here: the machine's own, or Debian's newest in a private prefix.

Version numbers and `criu check` do not tell (4.1.1 says "Looks good" on kernels where it cannot dump a
listening socket), so that the last word is a real dump and restore: `self_test`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from proxy_runtime.errors import ErgoError
from proxy_runtime.home import ergo_home
from proxy_runtime.process import checks as _checks
from proxy_runtime.process import debian
from proxy_runtime.process.checks import Check
from proxy_runtime.process.criu_binary import Criu, needed_version, probe, require_recent
from proxy_runtime.process.criu_errors import CriuError
from proxy_runtime.process.self_test import self_test

__all__ = ["Check", "Criu", "CriuError", "checks", "find", "install_private", "self_test"]

Progress = Callable[[str], None]

_SUITES: Final = ("forky", "sid")


def find(progress: Progress = lambda _: None, *, install: bool = True) -> Criu:
    """The CRIU to use: `ERGO_CRIU`, else PATH's, else the private one, which is made if it is missing.

    The machine's own is passed over when its version is too old for the running kernel.

    Args:
        progress: gets one sentence before anything slow.
        install: whether the private one may be made (about 10 s, 20 MB).

    Raises:
        CriuError: `criu.not-found`, `criu.too-old` (of ERGO_CRIU), `criu.install`.
    """
    forced = os.environ.get("ERGO_CRIU")
    if forced:
        criu = probe(Path(forced).absolute())
        if criu is None:
            raise CriuError(f"ERGO_CRIU={forced} is not a working criu.", code="criu.not-found",
                            remedy="Correct or unset it.")  # fmt: skip
        require_recent(criu)
        return criu
    own = shutil.which("criu", path=f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin")
    for path, prefix in (
        (Path(own).absolute() if own else None, None),
        (ergo_home() / "criu" / "criu", ergo_home() / "criu"),
    ):
        criu = probe(path, prefix) if path else None
        if criu is not None and criu.version >= needed_version():
            return criu
    if not install:
        raise CriuError("no usable CRIU is installed.", code="criu.not-found",
                        remedy="`ergo run` unpacks one for itself; or install CRIU 4.2 or later.")  # fmt: skip
    with _alone(ergo_home() / "criu.lock"):
        criu = probe(ergo_home() / "criu" / "criu", ergo_home() / "criu")  # another process may just have made it
        if criu is not None and criu.version >= needed_version():
            return criu
        return install_private(ergo_home() / "criu", progress)


def checks(python: str = sys.executable, init_binary: Path | str | None = None) -> list[Check]:
    """What this machine has and lacks, for `ergo doctor`. Installs nothing.

    Args:
        python: the interpreter that ranks will run with.
        init_binary: the compiled `init.c`; without it, it is compiled for the test.
    """

    def usable() -> Criu:
        return find(install=False)

    return _checks.all_checks(python, usable, init_binary)


def install_private(prefix: Path, progress: Progress = lambda _: None) -> Criu:
    """Unpacks Debian's newest CRIU into `prefix`, which appears complete and working or not at all.

    Raises:
        CriuError: `criu.install` with the reason of each suite that was tried.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    reasons: list[str] = []
    for suite in _SUITES:
        progress(f"Unpacking CRIU from Debian {suite} into {prefix} (once, about 20 MB).")
        with tempfile.TemporaryDirectory(dir=prefix.parent, prefix=".criu-") as scratch:
            tree = Path(scratch) / "criu"
            try:
                debian.unpack("criu", suite, tree, Path(scratch) / "apt")
                debian.wrap(tree, prefix, "usr/sbin/criu", tree / "criu")
            except debian.DebianError as error:
                reasons.append(f"{suite}: {error}")
                continue
            previous = Path(scratch) / "previous"
            if prefix.exists():
                prefix.rename(previous)
            tree.rename(prefix)
            criu = probe(prefix / "criu", prefix)
            if criu is not None and criu.version >= needed_version():
                return criu
            # Its wrapper names the final path, so that it could only be tried there.
            prefix.rename(Path(scratch) / "refused")
            if previous.exists():
                previous.rename(prefix)
            reasons.append(f"{suite}: " + (f"only {criu.version_text}" if criu else "it does not run"))
    raise CriuError(f"no usable CRIU could be unpacked ({'; '.join(reasons)}).", code="criu.install",
                    remedy="Install CRIU 4.2 or later yourself and set ERGO_CRIU to it.")  # fmt: skip


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Makes sure that there is a CRIU that works here (`make criu`); says which on standard output."""
    try:
        criu = find(lambda sentence: print(sentence, file=sys.stderr))
        self_test(criu)
    except ErgoError as error:
        print(error, file=sys.stderr)
        return 1
    print(criu.path)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What a rank is started with: its command, its environment, and secrets that only the node knows."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from model.job_spec import JobSpec, Secret
from proxy_runtime.node.errors import unsuitable

_SECRET_BYTES = 128 * 1024
_INHERITED = ("LANG", "LC_ALL", "TZ")
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PYTHONS = ("python", "python3")


@dataclass(frozen=True, slots=True)
class Command:
    """What every rank of a job runs.

    Attributes:
        argv: with the interpreter of this installation where the job says ``python``.
        env: without secrets: it is part of every manifest.
        secrets: variables whose values are never written anywhere.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    secrets: dict[str, str] = field(default_factory=dict[str, str], repr=False)

    @property
    def whole_env(self) -> dict[str, str]:
        """The environment of the processes."""
        return {**self.env, **self.secrets}


def command(spec: JobSpec, *, python: str = sys.executable, surroundings: Mapping[str, str] = os.environ) -> Command:
    """The command of a job on this node.

    Args:
        spec: the job.
        python: the interpreter that ``python`` and ``python3`` as the first word stand for.
        surroundings: environment of the node, of which a few variables are passed on and ``env:`` secrets are taken.

    Raises:
        NodeError: ``runtime.unsuitable``: the node does not have a secret or the program.
    """
    folder = str(Path(python).parent)
    env = {
        "PATH": f"{folder}{os.pathsep}{_SYSTEM_PATH}",
        "HOME": surroundings.get("HOME") or "/root",
        "LANG": "C.UTF-8",
        **{name: surroundings[name] for name in _INHERITED if surroundings.get(name)},
        **spec.environment,
    }
    secrets = {secret.variable: resolve(secret, surroundings) for secret in spec.secrets}
    first, *rest = spec.argv
    if first in _PYTHONS:
        first = python
    elif os.sep not in first and shutil.which(first, path=env["PATH"]) is None:
        raise unsuitable(
            f"The program {first!r} of the job is not on this node.",
            f"Install it there, or name it by its path; PATH is {env['PATH']}.",
        )
    return Command((first, *rest), env, secrets)


def resolve(secret: Secret, surroundings: Mapping[str, str] = os.environ) -> str:
    """The value of a secret: ``env:NAME`` from the node agent's environment, ``file:/path`` from a file of the node.

    Raises:
        NodeError: ``runtime.unsuitable``: the provider is unknown, or the node does not have the value.
    """
    provider, _, name = secret.reference.partition(":")
    match provider:
        case "env":
            if name not in surroundings:
                raise unsuitable(
                    f"The secret {secret.variable} is to come from the variable {name}, which this node does not have.",
                    "Set it for the node agent, or run the job on a node that has it.",
                )
            return surroundings[name]
        case "file":
            return _from_file(secret.variable, Path(name))
        case _:
            raise unsuitable(
                f"The secret {secret.variable} names the provider {provider!r}, which does not exist.",
                "Use env:NAME or file:/path.",
            )


def _from_file(variable: str, path: Path) -> str:
    try:
        if not path.is_absolute():
            raise OSError(0, "it is not an absolute path")
        with open(path, "rb") as file:
            data = file.read(_SECRET_BYTES + 1)
        if len(data) > _SECRET_BYTES or b"\0" in data:
            raise OSError(0, "it is too long for a variable, or has a zero byte")
        return data.decode().removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise unsuitable(
            f"The secret {variable} is to come from the file {path}, which cannot be used here: {reason}.",
            "Put it there, readable for the node agent, or run the job on a node that has it.",
        ) from None

"""From a file and flags to a JobSpec: pure, so that every combination can be tested without a fleet."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from proxy_runtime.errors import ErgoError

if TYPE_CHECKING:
    from model.job_spec import JobSpec

_SUFFIX = 6
_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"  # nothing that is read as something else
_LONGEST_NAME = 40
_LARGEST = 16 << 20  # bytes of a job file: all that a spec may hold is far less


class SpecError(ErgoError):
    """What was typed cannot become a job: wrong usage."""

    code = "submit.usage"


@dataclass(frozen=True, slots=True)
class Flags:
    """What was given on the command line; None was not given."""

    name: str | None = None
    tenant: str | None = None
    tier: str | None = None
    priority: int | None = None
    ranks: int | None = None
    min_devices: int | None = None
    pack: str | None = None
    devices: int | None = None
    checkpoint_every: int | None = None
    environment: tuple[str, ...] = ()
    command: tuple[str, ...] = field(default=())


def read_job_file(path: Path) -> dict[str, Any]:
    """Reads a job file, YAML or JSON, as a mapping; its fields are checked by `build_spec`.

    Raises:
        SpecError: it cannot be read, or is no mapping.
    """
    import yaml

    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)  # of a device file or a pipe, too, there may be no end
        if len(content) > _LARGEST:
            raise SpecError(f"The job file {path} has more than {_LARGEST >> 20} MiB.", code="submit.file")
        value = yaml.load(content.decode(), Loader=_loader(yaml))
    except OSError as error:
        raise SpecError(f"The job file {path} cannot be read: {error.strerror}.", code="submit.file") from None
    except UnicodeDecodeError:
        raise SpecError(f"The job file {path} is not text in UTF-8.", code="submit.file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "the whole"
        problem = getattr(error, "problem", None) or "it cannot be understood"
        raise SpecError(f"The job file {path}, {where}, is not YAML: {problem}.", code="submit.file") from None
    except RecursionError:
        raise SpecError(f"The job file {path} is nested too deeply.", code="submit.file") from None
    if not isinstance(value, dict):
        raise SpecError(
            f"The job file {path} is not a mapping of fields.",
            code="submit.file",
            remedy="Write `apiVersion: ergosphere/v1` first; docs/job-spec.md has all fields.",
        )
    return cast("dict[str, Any]", value)


def build_spec(file: Mapping[str, Any], flags: Flags, argv: Sequence[str], volume: Mapping[str, Any] | None) -> JobSpec:
    """The job that was asked for: flags come before the file.

    Args:
        file: fields of the job file; empty without one.
        flags: of the command line.
        argv: the command; empty for the file's own.
        volume: the job directory; None for the file's own.

    Raises:
        ModelError: with every fault.
        SpecError: a flag is not of its form.
    """
    from model.job_spec import API_VERSION, parse_submitted_spec

    fields: dict[str, Any] = dict(file) if file else {"apiVersion": API_VERSION}
    given = {
        "name": flags.name or fields.get("name") or (_name_of(argv) if argv else None),
        "tenant": flags.tenant,
        "tier": flags.tier,
        "priority": flags.priority,
        "ranks": flags.ranks,
        "min_width": flags.min_devices,
        "pack": flags.pack,
        "devices_per_rank": flags.devices,
        "argv": list(argv) or None,
        "volume": None if volume is None else dict(volume),
    }
    fields.update({name: value for name, value in given.items() if value is not None})
    if flags.devices is not None and fields.get("pack", "rank") == "rank":
        raise SpecError(
            "--devices says how many devices a script sees that starts its own ranks.",
            remedy="Add --pack node; or say with --ranks how many ranks are started, each with a device.",
        )
    if flags.checkpoint_every is not None:
        fields["checkpoint"] = {**_mapping(fields.get("checkpoint")), "every_s": flags.checkpoint_every or None}
    if flags.environment:
        fields["environment"] = {**_mapping(fields.get("environment")), **_variables(flags.environment)}
    return parse_submitted_spec(fields)


def command_line(command: Sequence[str], directory: Path | None, *, launcher: bool = False) -> list[str]:
    """The job's argv for what was typed: ``SCRIPT ARGS`` or ``-m MODULE ARGS``.

    Args:
        command: as typed.
        directory: what is uploaded, and so where the command runs; None where nothing is.
        launcher: where there is no such script, the name of a program of the nodes is meant, such as ``torchrun``; and
            an absolute path outside of the directory that is no ``.py`` file is one too.

    Raises:
        SpecError: the script is missing, or outside of the directory.
    """
    script, *arguments = command
    if script == "-m":
        if not arguments:
            raise SpecError("-m needs the name of a module.", remedy="`ergo submit -m package.train …`.")
        return ["python", "-m", *arguments]
    bare = launcher and "/" not in script
    if directory is None:
        program = launcher and (bare or script.startswith("/")) and not script.endswith(".py")
        return [script, *arguments] if program else ["python", script, *arguments]
    root = directory.resolve()
    if launcher and _is_program(Path(script), root):
        return [script, *arguments]
    # As `ergo run` reads it, relative to the directory; else as the shell completes it, relative to where one is.
    candidates = dict.fromkeys((root / script, Path.cwd() / script))
    found = next((path for path in candidates if path.is_file()), None)
    if found is None and bare and not (root / script).exists():
        return [script, *arguments]
    if found is None:
        kind = "is a directory" if (root / script).is_dir() else "does not exist"
        raise SpecError(f"The script {root / script} {kind}.", code="submit.script")
    real = found.resolve()
    if not real.is_relative_to(root):
        raise SpecError(
            f"The script {real} is outside of the directory {root}, which is all that the job will see.",
            code="submit.script",
            remedy="Name a directory above it with --dir.",
        )
    # A link inside keeps its name: what it leads to is uploaded at its own place.
    shown = found if found.is_relative_to(root) else real
    return ["python", str(shown.relative_to(root)), *arguments]


def _is_program(path: Path, root: Path) -> bool:
    """Whether a path names a program of the nodes: whether it is here too says nothing about them."""
    return path.is_absolute() and path.suffix != ".py" and not path.resolve().is_relative_to(root)


def fresh_job_id(name: str) -> str:
    """A job id for a name: its letters and digits, and six random ones, so that nobody else has it."""
    suffix = "".join(secrets.choice(_ALPHABET) for _ in range(_SUFFIX))
    return f"{label(name) or 'job'}-{suffix}"


def label(name: str) -> str:
    """What of a name can be part of an id; empty where nothing can."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:_LONGEST_NAME].strip("-")


def _name_of(argv: Sequence[str]) -> str:
    """A name for a command without one: the script's or module's own."""
    program, *words = argv
    if program not in ("python", "python3"):  # a launcher, such as torchrun
        script = next((word for word in words if word.endswith(".py")), program)
        return Path(script).stem
    if argv[1:2] == ["-m"]:
        return argv[2]
    return Path(argv[1] if len(argv) > 1 else argv[0]).stem


def _mapping(value: object) -> dict[str, Any]:
    # Something else is left for the checks of the spec to name.
    return dict(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else {}


def _variables(pairs: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            # The text may be a secret that was to be a value: it is not repeated.
            raise SpecError("--env takes NAME=VALUE.", remedy="Write it so, once for each variable.")
        if name in found:
            raise SpecError(f"--env sets {name} twice.", remedy="Keep one of them.")
        found[name] = value
    return found


def _loader(yaml: Any) -> Any:
    """YAML as JSON has it: a date stays a string, and a field that is there twice is an error."""

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                name = str(key.value)
                if name in seen:
                    problem = f"the field {name} is there twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(name)
            return super().construct_mapping(node, deep=deep)

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            try:
                return super().construct_object(node, deep=deep)
            except yaml.YAMLError:
                raise
            except (ValueError, KeyError, AttributeError, TypeError, OverflowError):
                # A tag says what the text is not, or the text only looks like a number: `!!int x`, `0b_`.
                problem = f"{str(node.value)[:40]!r} is no {node.tag.rpartition(':')[2]}"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    return Loader

"""Every argument and option of every command with absurd values: wrong usage, exit code 2, before anything is done.

What a command takes all the same, or can only be told by a fleet, is listed in FINE: an option that is new is swept,
and either refuses these values or says here why it takes them.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

from cli.main import app
from model.errors import ModelError
from proxy_runtime.errors import ErgoError

LONG = "x" * 5_000
NUMBERS = ["0", "-1", "1.5", "nan", "inf", "-inf", "1e300", "1" + "0" * 30, "", "x"]
TEXTS = ["", "x", "-", "a,a", "\udcff", "0", "nan", LONG]
PATHS = ["", "missing", "missing/x", "folder", "a-file", "binary", "nothing", LONG]
# What makes each command whole, so that only one thing is wrong.
BASE: dict[str, list[str]] = {
    "run": ["train.py"], "submit": ["--dry-run", "train.py"], "download": ["job", "path", "dest"],
    "migrate": ["--to", "node", "job"], "resize": ["--devices", "2", "job"], "quota set": ["team", "4"],
    "simulate": ["--nodes", "2", "--policies", "fifo", "log.csv"],
    **{name: ["job"] for name in ("show", "explain", "logs", "preempt", "resume", "checkpoint", "cancel")},
    # Of some options only together with others.
    "run restore": [], "run checkpoint": ["--restore=store"], "run job_id": ["--restore=store"],
    "submit devices": ["--dry-run", "--pack=node", "train.py"], "simulate jobs": ["--nodes=2", "--synthetic=itp"],
    "simulate synthetic": ["--nodes=2"],
    **{f"simulate {name}": ["--clusters=2,2", "--policies=fifo", "log.csv"] for name in (
        "lose", "level_mtbf", "transfer_seconds"
    )},
    "local resize": ["--devices", "2", "job"], "local resize at_step": ["--devices=2"],
    "simulate clusters": ["--policies=fifo", "log.csv"],
    "simulate load": ["--nodes=2", "--policies=fifo", "--synthetic=itp", "--jobs=9"],
    **{name: ["node"] for name in ("node cordon", "node drain", "node uncordon")},
}  # fmt: skip
NAMES = ["x", "-", "a,a", "0", "nan", "LONG"]
IDS = ["x", "0", "nan"]
OUTPUT = ["missing", "a-file", "binary", "nothing"]
FINE: dict[str, list[str]] = {
    # Whether there is such a job or node is for the fleet to say, which guesses what was meant.
    "local * job": [f"{name}!" for name in NAMES],
    "local * at_step": ["0!"],
    "events job": IDS,
    "* job": NAMES,
    "* node": NAMES,
    "migrate to": NAMES,
    "* reason": ["", *NAMES],
    "* tenant": IDS,
    "quota set under": IDS,
    # A file that is not there, or not of its kind, is told with exit code 1, or is made.
    "run command": ["missing!", "missing/x!", "folder!", "a-file", "binary", "nothing"],
    "run directory": ["missing!", "missing/x!", "folder!", "a-file!", "binary!", "nothing!"],
    "run checkpoint_dir": PATHS[1:-1],  # the store looks into it
    "run restore": PATHS[1:-1],
    "run checkpoint": NAMES,
    "run job_id": NAMES,
    "run python": [f"{name}!" for name in NAMES],
    "run json_report": OUTPUT,
    "doctor python": NAMES,
    "submit command": ["a-file", "binary", "nothing"],
    "download path": NAMES,
    "download dest": ["missing", "missing/x!", "folder", "a-file!", "binary!", "nothing!"],
    "up fleet_dir": ["missing", "missing/x", "folder"],
    "down fleet_dir": ["missing", "missing/x", "folder"],
    "simulate files": [f"{name}!" for name in PATHS[1:-1]],
    "simulate page": OUTPUT,
    # Numbers and words that are.
    "run cut_at": ["0"],
    "logs rank": ["0"],
    "up nodes": ["0"],
    "submit name": NAMES[:-1],
    "submit priority": ["0", "-1"],
    "submit checkpoint_every": ["0"],
    "quota set devices": ["0", "1.5"],
    "quota set weight": ["1.5"],
    "simulate seed": ["0", "-1", "1e30"],
    "simulate load": ["1.5"],
    "simulate resize_seconds": ["0", "1.5"],
    "simulate mtbf": ["1.5"],
    "simulate level_mtbf": ["1.5"],
    "simulate spot": ["0"],
}


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if getattr(command, "commands", None):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


ERGO: Any = typer.main.get_command(app)
SWEPT = {f"{name} {param.name}": (name, param) for name, command in commands(ERGO) for param in command.params
         if not getattr(param, "is_flag", False)}  # fmt: skip


class Begun(ErgoError):
    """The command has begun: what was typed is taken."""


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory) -> Iterator[Path]:
    """A directory to be in; no fleet, no jobs, and nothing that a command could start."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "train.py").write_text("pass\n")
    (folder / "a-file").write_text("text\n")
    (folder / "binary").write_bytes(bytes(range(256)))
    (folder / "image").write_bytes(bytes(reversed(range(256))))
    (folder / "nothing").touch()
    (folder / "folder").mkdir()
    rows = "".join(f"j{number},{number * 600},1800,{number % 3 + 1}\n" for number in range(5))
    (folder / "log.csv").write_text(f"job_id,submission_time,duration,num_gpu\n{rows}")

    import infra.local.down
    import infra.local.up
    import proxy_runtime.job
    import scheduling.simulator.page
    from infra.local import checks
    from infra.settings import Settings
    from proxy_runtime.process import criu_setup

    def begin(*_: object, **__: object) -> Any:
        raise Begun("It would begin.")

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        # The jobs that others run on this machine are none of ours.
        patch.setenv("ERGO_HOME", str(folder / "home"))
        patch.setenv("ERGO_FLEET_DIR", str(folder / "fleet"))
        for module, names in ((infra.local.up, ("up", "up_in_foreground")), (infra.local.down, ("down",))):
            for name in names:
                patch.setattr(module, name, begin)
        patch.setattr(proxy_runtime.job.Job, "start", begin)
        patch.setattr(proxy_runtime.job.Job, "restore", begin)
        patch.setattr(Settings, "load", begin)
        patch.setattr(scheduling.simulator.page, "page", lambda _: "")  # charts take seconds
        patch.setattr(criu_setup, "checks", begin)
        patch.setattr(checks, "checks", begin)
        yield folder


def ended(*words: str) -> tuple[str, str]:
    """How a command ends: ``usage``, ``sentence``, or ``begun`` where it takes what was typed; and what it says."""
    try:
        code = ERGO.main(list(words), prog_name="ergo", standalone_mode=False)
    except Begun:
        return "begun", ""
    except (ErgoError, ModelError) as error:
        return "sentence", str(error)
    except Exception as error:
        if getattr(error, "exit_code", None) != 2:
            raise
        return "usage", error.format_message()  # type: ignore[attr-defined]
    return ("begun", "") if not code else ("usage" if code == 2 else f"code {code}", "")


def values_of(param: Any) -> list[str]:
    kind = param.type_descriptor
    if param.name == "devices" and param.param_type_name == "argument":
        return NUMBERS  # or `none`
    inner = [part for part in (kind.annotation, *get_args(kind.annotation)) if isinstance(part, type)]
    if kind.is_path or Path in inner or param.name == "command":
        return PATHS
    return NUMBERS if int in inner or float in inner else TEXTS


def words_of(name: str, param: Any, value: str) -> list[str]:
    base = list(BASE.get(f"{name} {param.name}", BASE.get(name, ())))
    if param.param_type_name == "option":
        if (option := param.opts[0]) in base:
            del base[base.index(option) : base.index(option) + 2]
        return [*name.split(), f"{option}={value}", *base]
    arguments = [one for one in PARAMS[name] if one.param_type_name == "argument"]
    at = len(base) - len(arguments) + arguments.index(param) if base else 0
    given = [*base[:at], value, *base[at + 1 :]]
    return [*name.split(), *([] if base[:1] and base[0].startswith("-") else ["--"]), *given]


PARAMS = {name: command.params for name, command in commands(ERGO)}


@pytest.mark.parametrize("swept", SWEPT)
def test_absurd_values(swept, capfd):
    name, param = SWEPT[swept]
    taken = []
    for value in values_of(param):
        how, text = ended(*words_of(name, param, value))
        told = text + capfd.readouterr().err
        assert how in ("usage", "sentence", "begun"), (value[:40], how)
        if how != "begun":
            assert len(told) > 15 and "Traceback" not in told, (value[:40], how, told)
        if how != "usage":
            short = {LONG: "LONG", "1" + "0" * 30: "1e30"}.get(value, value)
            taken.append(f"{short}!" if how == "sentence" else short)
    fine = [values for pattern, values in FINE.items() if fnmatch.fnmatch(swept, pattern)]
    assert taken == (fine[0] if fine else [])


def test_nothing_is_listed_that_is_not_there():
    assert [pattern for pattern in FINE if not fnmatch.filter(SWEPT, pattern)] == []
    assert [name for name in BASE if name not in SWEPT and name not in PARAMS] == []


CONTRADICTIONS = [
    ("run --restore=folder train.py", "its own script"),
    *((f"run --restore=folder {option}", "a job keeps what it began with") for option in (
        "--nproc=2", "--pack=node", "--threads=2", "--device-memory=1GiB", "--network=private", "--python=python3"
    )),
    ("run --restore=folder --checkpoint-dir=folder", "the checkpoints of --restore"),
    ("run --job=x train.py", "only with --restore"),
    ("run --pack=node --nproc=2 train.py", "started once"),
    ("run --cut-at=3 --cut-at=5 --cut-at=3 train.py", "3 is there twice"),
    ("run --cut-every=0s train.py", "not a duration"),
    ("run --cut-every=999999h train.py", "not a duration"),
    ("submit --dry-run --dir=. --no-upload train.py", "--no-upload uploads nothing"),
    ("submit --dry-run --env=A=1 --env=A=2 train.py", "sets A twice"),
    ("submit --dry-run --ranks=2 --min-devices=3 train.py", "`min_width`"),
    ("submit --dry-run --pack=node --ranks=2 train.py", "started once"),
    ("submit --dry-run -f image train.py", "not text in UTF-8"),
    ("submit --dry-run -f nothing train.py", "not a mapping"),
    ("submit --dry-run -f folder train.py", "Is a directory"),
    ("submit --dry-run", "A script is needed"),
    ("quota set team 4 --under team", "not below itself"),
    ("quota set team many", "'many' is no number"),
    ("up --fleet-dir a-file", "is not a directory"),
    ("simulate --nodes=2 log.csv ./log.csv", "is there twice"),
    ("simulate --nodes=2 --spot=3 log.csv", "more than the 2"),
    ("simulate --nodes=2 --clusters=2,2 log.csv", "either --nodes or --clusters"),
    ("simulate --nodes=2 --transfer-seconds=1,2 log.csv", "with --clusters only"),
    ("simulate --nodes=2 --lose=fleet:1-2 log.csv", "Only with --clusters"),
    ("simulate --clusters=2,2 --lose=fleet:1-2 log.csv", "--lose"),
    ("local resize", "Missing option '--devices'"),
    ("ps --tenant=A", "is not the id of a tenant"),
    ("events --job=A", "is not the id of a job"),
    ("show job another", "unexpected extra argument"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "says"), CONTRADICTIONS)
def test_what_does_not_go_together(line, says, capfd):
    how, text = ended(*line.split())
    assert how == "usage" and says in text + capfd.readouterr().err


def test_arguments_of_a_script_may_be_anything():
    for command in (["run"], ["submit", "--dry-run"]):
        assert ended(*command, "train.py", "ö", "-1", LONG[:4000])[0] == "begun"
    assert ended("run", "train.py", "")[0] == "begun"  # a JobSpec has no empty argument


def test_completion_of_a_value_that_is_not_whole_yet_disturbs_nobody():
    from typer.testing import CliRunner

    line = {"_ERGO_COMPLETE": "complete_bash", "COMP_WORDS": "ergo ps --tenant  --js", "COMP_CWORD": "4"}
    assert CliRunner().invoke(app, [], prog_name="ergo", env=line).exit_code == 0

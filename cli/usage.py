"""What no command takes, whatever its options are, and values that are more than a word or a number: wrong usage."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

import typer
from typer.core import TyperCommand

from cli.console import say
from model.errors import ModelError
from proxy_runtime.errors import ErgoError

T = TypeVar("T")
MOST_RANKS = 1 << 20
LAST_STEP = (1 << 63) - 1
_LONGEST_NAME, _LONGEST_PATH = 255, 4095  # bytes, as the kernel has it
_MAY_BE_EMPTY = frozenset({"reason"})
_PROGRAM = "command"  # a script and its own arguments, which may be anything


class Command(TyperCommand):
    """A command that refuses, before anything of it runs, what cannot be meant.

    That is an empty value (to Path it is the current directory, to others the same as no value), a name that no file
    can have, and text that is none: whoever would be asked about it could only fail.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Looks at the words as they were typed."""
        if not ctx.resilient_parsing:
            given, _, _ = self.make_parser(ctx).parse_args(list(args))
            for param in self.get_params(ctx):
                for value in _texts(given.get(param.name or ""), param.name == _PROGRAM):
                    if fault := _fault(value, param):
                        raise typer.BadParameter(fault, ctx=ctx, param=cast("Any", param))
            if not given.get("quiet"):
                _tell_strays(ctx, self.get_params(ctx), given.get(_PROGRAM))
        return super().parse_args(ctx, args)


def adopt(app: typer.Typer) -> None:
    """Makes all commands of a group, and of those below it, such commands."""
    for command in app.registered_commands:
        command.cls = Command
    for group in app.registered_groups:
        if group.typer_instance is not None:
            adopt(group.typer_instance)


def parsed(parse: Callable[[str], T], value: str | None) -> T | None:
    """What an option's value stands for; None where it was not given.

    Raises:
        typer.BadParameter: nothing. In the callback of an option, its name is put before the sentence.
    """
    if value is None:
        return None
    try:
        return parse(value)
    except (ModelError, ErgoError) as error:
        raise typer.BadParameter(str(error)) from None


def tenant(value: str | None) -> str | None:
    """The callback of an option that names a tenant."""
    from model.ids import TenantId

    return parsed(TenantId, value)


def job_id(value: str | None) -> str | None:
    """The callback of an option that names a job."""
    from model.ids import JobId

    return parsed(JobId, value)


def once(values: list[T] | None) -> list[T] | None:
    """The callback of an option that may be repeated, but not with the same value."""
    for value in values or ():
        if (values or []).count(value) > 1:
            raise typer.BadParameter(f"{value} is there twice.")
    return values


def _texts(value: Any, program: bool) -> Iterable[str]:
    words = value if isinstance(value, list | tuple) else [value]
    return [word for word in (words[:1] if program else words) if isinstance(word, str)]


def _tell_strays(ctx: Any, params: Iterable[Any], program: Any) -> None:
    """Says which options of ours stand behind the script: they are its own there, but may be meant for us."""
    words = [str(word) for word in program[1:]] if isinstance(program, list | tuple) else []
    typed = {word.partition("=")[0] for word in itertools.takewhile("--".__ne__, words)}
    ours = [name for param in params for name in (*param.opts, *param.secondary_opts) if name.startswith("--")]
    if strays := [name for name in ours if name in typed]:
        say(
            f"{', '.join(strays)} after the script goes to the script; options of `ergo {ctx.info_name}` come before it"
        )


def _is_path(param: Any) -> bool:
    kind = param.type_descriptor  # typer's own test does not see a list of paths
    return kind.is_path or any(inner is Path for inner in get_args(kind.annotation))


def _fault(value: str, param: Any) -> str:
    if not value:
        return "" if param.name in _MAY_BE_EMPTY else "It is empty."
    path = param.name == _PROGRAM or _is_path(param)
    if path:
        name = os.fsencode(value)
        if len(name) > _LONGEST_PATH or max(map(len, name.split(b"/"))) > _LONGEST_NAME:
            return f"It is longer than the name of a file can be: {value[:40]}…"
    elif any("\ud800" <= character <= "\udfff" for character in value):
        return "It is not text in UTF-8."
    return ""

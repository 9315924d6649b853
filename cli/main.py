"""`ergo`: entry point, and what all commands share."""

from __future__ import annotations

import importlib
import os
import signal
import sys


def _interrupted_early(number: int, _: object) -> None:
    """Until a command has a handler of its own: no traceback of whatever was being imported."""
    os.write(2, f"ergo: interrupted by {signal.Signals(number).name}.\n".encode())
    os._exit(128 + number)


for _number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(_number, _interrupted_early)

import typer  # noqa: E402  the handlers come first: importing takes most of a second

from cli import usage  # noqa: E402
from model.errors import ModelError  # noqa: E402
from proxy_runtime.errors import ErgoError  # noqa: E402

app = typer.Typer(
    name="ergo",
    help="Preempt, move and resize PyTorch jobs at any moment, bit for bit.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# In the order of the help. Each imports what it needs of the runtime, or of the fleet, when it is called: a shell that
# asks for help or a completion waits for none of it.
_PANELS = {
    "On this machine": ("run", "local", "doctor"),
    "Jobs of a fleet": (
        "fleet.submit",
        "fleet.ps",
        "fleet.show",
        "fleet.logs",
        "fleet.control",
        "fleet.download",
    ),
    "A fleet": ("up", "fleet.nodes", "fleet.operate", "fleet.sla", "events"),
    "No fleet": ("simulate",),
}
for _panel, _names in _PANELS.items():
    for _name in _names:
        _before = len(app.registered_commands), len(app.registered_groups)
        importlib.import_module(f"cli.{_name}").register(app)
        for _added in (*app.registered_commands[_before[0] :], *app.registered_groups[_before[1] :]):
            _added.rich_help_panel = _panel
usage.adopt(app)


def main() -> None:
    """Runs the command line; an error of ours becomes one sentence and exit code 1."""
    code = 0
    try:
        app()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except (ErgoError, ModelError) as error:
        print(f"ergo: {error}", file=sys.stderr)
        code = 1
    _exit(code)


def _exit(code: int) -> None:
    """Ends the process with this code, whatever threads there are.

    The workflow engine's client has threads of its own, in native code, that call into Python when an answer comes
    late: while the interpreter is being taken down that aborts the process (seen: SIGABRT instead of exit code 1).
    """
    if "temporalio" not in sys.modules:
        sys.exit(code)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        pass  # whoever read it has gone
    os._exit(code)


if __name__ == "__main__":
    main()

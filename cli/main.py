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
for _name in (
    "run",
    "local",
    "doctor",
    "up",
    "fleet.nodes",
    "fleet.submit",
    "fleet.ps",
    "fleet.show",
    "fleet.logs",
    "fleet.control",
    "fleet.download",
    "events",
):
    importlib.import_module(f"cli.{_name}").register(app)


def main() -> None:
    """Runs the command line; an error of ours becomes one sentence and exit code 1."""
    try:
        app()
    except (ErgoError, ModelError) as error:
        print(f"ergo: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()

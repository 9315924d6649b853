"""`ergo`: entry point, and what all commands share."""

from __future__ import annotations

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

from cli import doctor, local, run  # noqa: E402
from model.errors import ModelError  # noqa: E402
from proxy_runtime.errors import ErgoError  # noqa: E402

app = typer.Typer(
    name="ergo",
    help="Preempt, move and resize PyTorch jobs at any moment, bit for bit.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
run.register(app)
local.register(app)
doctor.register(app)


def main() -> None:
    """Runs the command line; an error of ours becomes one sentence and exit code 1."""
    try:
        app()
    except (ErgoError, ModelError) as error:
        print(f"ergo: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()

"""`ergo`: entry point, and what all commands share."""

from __future__ import annotations

import sys

import typer

from cli import doctor, local, run
from model.errors import ModelError
from proxy_runtime.errors import ErgoError

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

"""The `bigmodel` command: one file a subcommand, joined here."""

from __future__ import annotations

from typing import Any

import typer

from ..errors import BigModelError
from .env import env
from .generate import generate
from .inspect import inspect
from .output import fail
from .plan import plan

__all__ = ["app", "main"]

app = typer.Typer(
    name="bigmodel",
    help="PyTorch models that are too big for where they have to run: look into checkpoints, plan device maps, generate text.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(inspect)
app.command()(plan)
app.command()(generate)
app.command()(env)


def main(arguments: list[str] | None = None) -> Any:
    """Runs the command line; errors that bigmodel raises on purpose become one message on stderr and exit code 1."""
    try:
        return app(arguments)
    except BigModelError as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("Interrupted.", code=130)

"""The `bigmodel` command: one file a subcommand, joined here."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from .. import __version__
from ..errors import BigModelError
from .bench import bench
from .config import config
from .elsewhere import to_fsdp2, tpu_config
from .env import env
from .estimate_memory import DtypesCommand, estimate_memory
from .generate import generate
from .inspect import inspect
from .launch import launch
from .launch_options import LaunchCommand
from .load import load
from .merge_weights import merge_weights
from .output import fail, print_json
from .plan import plan
from .self_test import self_test

__all__ = ["app", "main"]

app = typer.Typer(
    name="bigmodel",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"bigmodel {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)] = False,
) -> None:
    """PyTorch models that are too big for where they have to run: check checkpoints, plan device maps, generate text, launch training."""


app.command()(inspect)
app.command()(load)
app.command()(plan)
app.command(cls=DtypesCommand)(estimate_memory)
app.command()(generate)
app.command()(bench)
app.command()(env)
app.command()(merge_weights)
app.add_typer(config)
app.command("test")(self_test)
for absent in (tpu_config, to_fsdp2):
    app.command(hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(absent)
# What follows the script is the script's, also where it looks like an option.
app.command(cls=LaunchCommand, context_settings={"allow_interspersed_args": False})(launch)


def main(arguments: list[str] | None = None) -> Any:
    """Runs the command line; errors that bigmodel raises on purpose become one message on stderr and exit code 1.

    With `--json` stdout says so as well: `{"error": …}`.
    """
    try:
        return app(arguments)
    except BigModelError as error:
        given = sys.argv[1:] if arguments is None else arguments
        if "--json" in given and given[0] != "launch":  # whose other arguments are the script's
            print_json({"error": str(error)})
        fail(str(error))
    except KeyboardInterrupt:
        fail("Interrupted.", code=130)

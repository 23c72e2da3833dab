"""`bigmodel config default`: the file that `bigmodel launch` reads, for this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from ..training.config_file import DEFAULT_CONFIG_FILE, write_basic_config
from .output import console, fail

__all__ = ["config"]

config = typer.Typer(name="config", help="The file that bigmodel launch reads.")

FILE = "YAML, or JSON where it ends with .json; without it, the file that is read where no other is named."


@config.callback(invoke_without_command=True)
def ask(context: typer.Context, config_file: Annotated[str | None, typer.Option("--config_file", help=FILE, hidden=True)] = None) -> None:
    """The file that bigmodel launch reads."""
    if context.invoked_subcommand is None:
        named = f" --config_file {config_file}" if config_file else ""
        fail(f"bigmodel config asks no questions: bigmodel config default{named} writes a file for this machine, to be edited.")


@config.command()
def default(
    config_file: Annotated[str | None, typer.Option("--config_file", "--config-file", help=FILE)] = None,
    mixed_precision: Annotated[str, typer.Option("--mixed_precision", "--mixed-precision", help="no, fp16, bf16 or fp8.")] = "no",
) -> None:
    """Writes a file for this machine, a process for each accelerator; one that is there already stays."""
    file = write_basic_config(mixed_precision, config_file or DEFAULT_CONFIG_FILE)
    if file:
        option = f" --config_file {file}" if config_file else ""
        console.print(f"{file}: written; bigmodel launch{option} reads it.", soft_wrap=True)


@config.command(hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def update() -> None:
    """Says that there is nothing to update."""
    fail("There is nothing to update: older files are read as they are.")

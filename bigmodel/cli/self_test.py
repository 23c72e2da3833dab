"""`bigmodel test`: whether jobs that are launched as the config file says run on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from ..training.config_file import read_launch_settings
from ..training.launchers import launch_script

__all__ = ["self_test"]


def self_test(
    config_file: Annotated[
        str | None, typer.Option("--config_file", "--config-file", help="Of bigmodel launch; without it, the one that it would read.")
    ] = None,
) -> None:
    """Launches a job of a few seconds as bigmodel launch would: its processes meet, gather, and train a small model."""
    launch_script(read_launch_settings(config_file), ["bigmodel.training.self_check"], module=True)

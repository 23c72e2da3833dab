"""`bigmodel env`: what a bug report needs to say of the machine."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Annotated, Any

import psutil
import torch
import typer
from rich.table import Table

from ..devices import accelerator_type, accelerators, available_host_bytes, device_memory
from ..text import bytes_text
from ..training.config_file import find_config_file, read_launch_settings
from .output import console, print_json

__all__ = ["env"]

PACKAGES = ("bigmodel", "torch", "safetensors", "huggingface_hub", "bitsandbytes", "numpy", "transformers")


def env(
    config_file: Annotated[
        str | None, typer.Option("--config_file", "--config-file", help="Of bigmodel launch; without it, the one that it would read.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Versions, devices and memory of this machine, and how bigmodel launch is set up."""
    facts = _facts(config_file)
    if as_json:
        print_json(facts)
        return
    table = Table("what", "value", title="bigmodel env")
    table.add_row("python", facts["python"])
    table.add_row("platform", facts["platform"])
    for name, version in facts["packages"].items():
        table.add_row(name, version or "not installed")
    table.add_row("cores", str(facts["cores"]))
    table.add_row("RAM available / total", f"{bytes_text(facts['ram_available_bytes'])} / {bytes_text(facts['ram_total_bytes'])}")
    if not facts["accelerators"]:
        table.add_row("accelerators", "none")
    for device in facts["accelerators"]:
        table.add_row(device["device"], f"{bytes_text(device['free_bytes'])} free of {bytes_text(device['total_bytes'])}")
    config = facts["launch_config"]
    table.add_row("launch config", config["file"] if config else "none")
    for key, value in config["settings"].items() if config else ():
        if value not in (None, {}):
            table.add_row(f"  {key}", str(value))
    console.print(table)


def _facts(config_file: str | None) -> dict[str, Any]:
    devices = [(device, *device_memory(device)) for device in accelerators()]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cores": psutil.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "ram_available_bytes": available_host_bytes(),
        "ram_total_bytes": psutil.virtual_memory().total,
        "accelerator_type": accelerator_type(),
        "accelerators": [{"device": str(device), "free_bytes": free, "total_bytes": total} for device, free, total in devices],
        "launch_config": _launch_config(config_file),
    }


def _launch_config(config_file: str | None) -> dict[str, Any] | None:
    """The file that a launch reads, and its settings; None without one."""
    file = find_config_file(config_file)
    return None if file is None else {"file": str(file), "settings": read_launch_settings(file).to_dict()}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

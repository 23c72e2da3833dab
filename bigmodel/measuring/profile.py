"""Where the figures of a machine are kept: one file a machine in the user's cache folder, never another machine's."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from pathlib import Path
from typing import Any, Final

import psutil
import torch

from ..atomic import write_atomically
from ..constants import GiB, MiB
from ..devices import accelerators, device_memory, device_name, host_cores
from ..errors import MachineError
from ..machine import Machine

__all__ = ["cache_folder", "identity", "keep_machine", "kept_machine", "profile_file"]

logger = logging.getLogger(__name__)

FORMAT: Final = 1
"""Of the file; files of another format are measured anew."""


def cache_folder() -> Path:
    """The user's folder for what can be made again: `BIGMODEL_CACHE`, else `bigmodel` in `XDG_CACHE_HOME`, else `~/.cache/bigmodel`."""
    own = os.environ.get("BIGMODEL_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification: relative paths are to be ignored.
    return (Path(shared) if os.path.isabs(shared) else Path.home() / ".cache") / "bigmodel"


def identity() -> dict[str, Any]:
    """What makes figures valid: the hardware, the cores that this process may use, and torch's release, whose kernels they are of."""
    return {
        "processor": device_name(torch.device("cpu")),
        "architecture": platform.machine(),
        "cores": host_cores(),
        "threads": torch.get_num_threads(),
        "ram_gib": round(psutil.virtual_memory().total / GiB),
        "accelerators": [f"{device_name(device)}, {device_memory(device)[1] // MiB} MiB" for device in accelerators()],
        "torch": ".".join(torch.__version__.split(".")[:2]),
    }


def profile_file() -> Path:
    """The file of this machine's figures; machines that share a home folder have one each."""
    digest = hashlib.sha256(json.dumps(identity(), sort_keys=True).encode()).hexdigest()
    return cache_folder() / f"machine-{digest[:16]}.json"


def keep_machine(machine: Machine) -> Path:
    """Keeps the figures of this machine for later plans; returns the file. Raises `MachineError` where it cannot be written."""
    file = profile_file()
    content = {"format": FORMAT, "identity": identity(), "machine": json.loads(machine.to_json())}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(content, indent=2).encode())
    except OSError as error:
        raise MachineError(f"{file}: the figures cannot be kept: {error}. Name another folder in BIGMODEL_CACHE.") from error
    return file


def kept_machine() -> Machine | None:
    """The kept figures of this machine; None where there are none. A file that cannot be used is logged and counts as none."""
    file = profile_file()
    try:
        content = json.loads(file.read_text())
        if content["format"] != FORMAT or content["identity"] != identity():
            return None
        return Machine.from_json(json.dumps(content["machine"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("%s cannot be used (%s: %s): run `bigmodel bench` to measure this machine anew.", file, type(error).__name__, error)
        return None

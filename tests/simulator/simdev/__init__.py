"""Simulated accelerators for PyTorch, `sim:0`, `sim:1`, …, backed by host memory.

`register()` builds and loads the extension and makes the device type known to torch, for the rest of the process; there are no devices
until `torch.sim.set_up(count, memory, …)`, and none again after `torch.sim.tear_down()`. Tests use the fixture `accelerators` instead.
"""

from __future__ import annotations

import atexit
import importlib.machinery
import importlib.util
from functools import cache
from types import ModuleType

import torch

from .compilation import SimulatorBuildError, build
from .device_module import device_module
from .settings import MAX_DEVICES

__all__ = ["NAME", "SimulatorBuildError", "build", "register"]

NAME = "sim"


@cache
def register() -> ModuleType:
    """Makes `torch.sim` and the device type `sim` known to torch. Raises `SimulatorBuildError`."""
    extension = _load()
    torch.utils.rename_privateuse1_backend(NAME)
    module = device_module(extension, NAME)
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _start_autograd_threads(module)
    atexit.register(module.tear_down)  # no copy may be under way while the interpreter goes away
    return module


def _load() -> ModuleType:
    path = str(build())
    loader = importlib.machinery.ExtensionFileLoader("_sim_C", path)
    spec = importlib.util.spec_from_file_location("_sim_C", path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
    except ImportError as error:  # symbols that this torch lacks
        raise SimulatorBuildError(f"The simulated accelerator was built but does not load: {error}") from error
    loader.exec_module(module)
    return module


def _start_autograd_threads(module: ModuleType) -> None:
    # Autograd makes one thread for each device that exists at the first backward pass of the process, and none later.
    module.set_up(MAX_DEVICES, 1 << 20)
    torch.ones(1, requires_grad=True).sum().backward()
    module.tear_down()

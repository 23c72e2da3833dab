"""Hooks that move or cast a whole module: whole models that take turns on one device, and layers that rest in a small dtype."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..devices import accelerators, as_device
from .hooks import ModelHook, add_hook_to_module, outside_compilation, remove_hook_from_module
from .movement import is_tensor_on, move

__all__ = [
    "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING",
    "CpuOffload",
    "LayerwiseCastingHook",
    "UserCpuOffloadHook",
    "attach_cpu_offload_hook",
    "attach_layerwise_casting_hooks",
]

SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING: tuple[type[nn.Module], ...] = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)


class CpuOffload(ModelHook):
    """Keeps a whole model on CPU until its first forward, which moves it to `execution_device`, where it stays until it is offloaded.

    `execution_device` is by default the first accelerator, or CPU without one. With `prev_module_hook`, that hook's model goes back to
    CPU first. Inputs are moved at every forward.
    """

    is_begun_anew = False

    def __init__(self, execution_device: Any = None, prev_module_hook: UserCpuOffloadHook | None = None) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device: Any
        if execution_device is None:
            self.execution_device = next(iter(accelerators()), torch.device("cpu"))
        else:
            self.execution_device = execution_device

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to("cpu")

    @outside_compilation
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        device = as_device(self.execution_device)
        previous = self.prev_module_hook
        if previous is not None and device.type != "cpu":
            first = next(previous.model.parameters(), None)
            if first is not None and first.device.type != "cpu":
                previous.offload()
        first = next(module.parameters(), None)
        if first is None or not is_tensor_on(first, device):
            module.to(device)
        return tuple(move(value, device) for value in args), {name: move(value, device) for name, value in kwargs.items()}


class UserCpuOffloadHook:
    """What `attach_cpu_offload_hook` hands out: `offload()` sends the model back to CPU, `remove()` takes the hook off."""

    def __init__(self, model: nn.Module, hook: CpuOffload) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Moves the model to CPU; its next forward moves it to its device again."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Takes the hook off; the model stays where it is."""
        remove_hook_from_module(self.model)


def attach_cpu_offload_hook(
    model: nn.Module, execution_device: Any = None, prev_module_hook: UserCpuOffloadHook | None = None
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Puts the model on CPU; its first forward moves all of it to `execution_device`, where it stays until `hook.offload()`.

    Returns the model and its hook. With `prev_module_hook`, running this model first sends that hook's model back to CPU.
    """
    hook = CpuOffload(execution_device=execution_device, prev_module_hook=prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


class LayerwiseCastingHook(ModelHook):
    """Keeps a layer's weights in `storage_dtype` and casts them to `compute_dtype` for its forward.

    Forwards in several threads share the cast weights; the last one out casts them back.
    """

    is_begun_anew = False
    _is_stateful = False

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool = False) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking
        self._uses = 0
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerwiseCastingHook:
        return memo.setdefault(id(self), LayerwiseCastingHook(self.storage_dtype, self.compute_dtype, self.non_blocking))

    def __reduce__(self) -> tuple[Any, ...]:
        return LayerwiseCastingHook, (self.storage_dtype, self.compute_dtype, self.non_blocking)

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    @outside_compilation
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        with self._lock:
            if self._uses == 0:
                module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
            self._uses += 1
        return args, kwargs

    @outside_compilation
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.forward_failed(module)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        with self._lock:
            self._uses -= 1
            if self._uses == 0:
                module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Sequence[str] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Adds a `LayerwiseCastingHook` to every linear and convolution layer below `module`, and to itself if it is one.

    Modules whose dotted name is matched by one of the patterns (`re.search`), or that are of one of the classes, are left alone with
    everything below them.
    """
    patterns = (skip_modules_pattern,) if isinstance(skip_modules_pattern, str) else tuple(skip_modules_pattern or ())
    _attach_casting(module, storage_dtype, compute_dtype, patterns, skip_modules_classes or (), non_blocking, "")


def _attach_casting(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    patterns: tuple[str, ...],
    classes: tuple[type[nn.Module], ...],
    non_blocking: bool,
    name: str,
) -> None:
    if (classes and isinstance(module, classes)) or any(re.search(pattern, name) for pattern in patterns):
        return
    if isinstance(module, SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING):
        add_hook_to_module(module, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True)
        return
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        _attach_casting(child, storage_dtype, compute_dtype, patterns, classes, non_blocking, path)

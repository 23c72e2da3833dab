"""What a module inside a block shows as its hook: the block's does the work, and scripts look for one wherever weights are offloaded."""

from __future__ import annotations

import contextlib
import weakref
from copy import deepcopy
from typing import Any

from torch import nn

from .align import AlignDevicesHook, as_torch_device
from .hooks import outside_compilation
from .lazy import LazyTensor
from .offload import WeightsMap, swap_in_values

__all__ = ["ShownHook", "has_offloaded_params"]


class ShownHook(AlignDevicesHook):
    """Stands for the hook of the block around a module, for scripts that ask a module of offloaded weights for its own.

    `offload`, `execution_device` and `weights_map` say what is true of the module's own weights at the moment. It does not take part in
    the module's forward. Scripts that call `pre_forward` and `post_forward` by themselves have real weights in between, on
    `execution_device`; what they change in them in place is written to where they rest.
    """

    only_shows = True

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._device: Any = None
        super().__init__(offload=True, weights_map=WeightsMap(module))
        self._swapped: list[contextlib.ExitStack] = []

    @property
    def execution_device(self) -> Any:
        """Where the weights run, or what was put here instead."""
        return self._device if self._device is not None else next((lazy.origin.device for lazy in self._offloaded()), None)

    @execution_device.setter
    def execution_device(self, device: Any) -> None:
        # While it is made the module may still be without tensors: copies of both are filled together.
        self._device = None if device is None or device == self.execution_device else device

    @property
    def offload(self) -> bool:
        """Whether any of the module's own weights is away."""
        return self._offload and bool(self._offloaded())

    @offload.setter
    def offload(self, value: bool) -> None:
        self._offload = value

    def _offloaded(self) -> list[LazyTensor]:
        module = self._module()
        return [] if module is None else _offloaded(module)

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module

    @outside_compilation
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        device = None if self.execution_device is None else as_torch_device(self.execution_device)
        with contextlib.ExitStack() as stack:
            for table in (module._parameters, module._buffers):
                stack.enter_context(swap_in_values(table, device))  # type: ignore[arg-type]
            args, kwargs = super().pre_forward(module, *args, **kwargs)
            self._swapped.append(stack.pop_all())
        return args, kwargs

    @outside_compilation
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        try:
            return super().post_forward(module, output)
        finally:
            self._give_back()

    @outside_compilation
    def forward_failed(self, module: nn.Module) -> None:
        try:
            super().forward_failed(module)
        finally:
            self._give_back()

    def _give_back(self) -> None:
        if self._swapped:
            self._swapped.pop().close()

    def __deepcopy__(self, memo: dict[int, Any]) -> ShownHook:
        made = ShownHook(deepcopy(self._module(), memo))  # type: ignore[arg-type]
        made._device, made._offload = self._device, self._offload
        made.io_same_device, made.offload_buffers, made.skip_keys = self.io_same_device, self.offload_buffers, self.skip_keys
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return super().__reduce_ex__(protocol) if self.offload else (ShownHook, (self._module(),))


def _offloaded(module: nn.Module) -> list[LazyTensor]:
    return [tensor for table in (module._parameters, module._buffers) for tensor in table.values() if isinstance(tensor, LazyTensor)]


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether the module's weights are offloaded and come for a forward: its own, or that of the block around it.

    A module with a hook of another kind, or with several hooks, is answered False, as scripts expect. One whose weights come with the
    block around it shows a hook of its own from then on (`ShownHook`): scripts go on with `module._hf_hook`.
    """
    hook = getattr(module, "_hf_hook", None)
    if hook is None and any(isinstance(parameter, LazyTensor) for parameter in module.parameters(recurse=False)):
        hook = ShownHook(module)
        hook.offload_buffers = any(isinstance(buffer, LazyTensor) for buffer in module.buffers(recurse=False))
        module._hf_hook = hook  # type: ignore[assignment]
    return isinstance(hook, AlignDevicesHook) and bool(hook.offload)

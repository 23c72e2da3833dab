"""The hook classes and functions, and what libraries take from here beside them, under the path that scripts import."""

from __future__ import annotations

from .dispatch import (
    AlignDevicesHook,
    CpuOffload,
    DispatchHook,
    LayerwiseCastingHook,
    ModelHook,
    SequentialHook,
    UserCpuOffloadHook,
    add_hook_to_module,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    find_device,
    remove_hook_from_module,
    remove_hook_from_submodules,
    send_to_device,
)
from .loading import PrefixedDataset, set_module_tensor_to_device
from .modules import get_non_persistent_buffers, named_module_tensors

__all__ = [
    "AlignDevicesHook",
    "CpuOffload",
    "DispatchHook",
    "LayerwiseCastingHook",
    "ModelHook",
    "PrefixedDataset",
    "SequentialHook",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "find_device",
    "get_non_persistent_buffers",
    "named_module_tensors",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
    "send_to_device",
    "set_module_tensor_to_device",
]

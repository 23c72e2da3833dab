"""Bringing weights to the arithmetic: groups, placeholders, the pool that they pass through, and the hooks that do it."""

from __future__ import annotations

from .agreement import refuse_contradictions
from .align import AlignDevicesHook
from .attach import attach_align_device_hook, attach_align_device_hook_on_blocks, attach_execution_device_hook
from .dispatch_hook import DispatchHook
from .engine import dispatch, dispatched, undispatch
from .facade import replace_method, show_device_map
from .full_state_dict import get_state_dict_from_offload, get_state_dict_offloaded_model
from .functions import execution_devices
from .hooks import (
    ModelHook,
    ModuleReference,
    OwnForward,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from .lazy import LazyTensor
from .movement import find_device, send_to_device
from .offload_hooks import (
    SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING,
    CpuOffload,
    LayerwiseCastingHook,
    UserCpuOffloadHook,
    attach_cpu_offload_hook,
    attach_layerwise_casting_hooks,
)
from .origin import Origin
from .placeholder import Placeholder
from .recording import Activity, Timeline
from .shown_hook import has_offloaded_params
from .state import (
    Placement,
    PlacementRow,
    align_module_device,
    get_parameter,
    get_parameter_device,
    placement,
    timeline,
    update_parameter,
    values_of,
)
from .stores import MappingStore, MemoryStore, ResidentStore, as_store

__all__ = [
    "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING",
    "Activity",
    "AlignDevicesHook",
    "CpuOffload",
    "DispatchHook",
    "LayerwiseCastingHook",
    "LazyTensor",
    "MappingStore",
    "MemoryStore",
    "ModelHook",
    "ModuleReference",
    "Origin",
    "OwnForward",
    "Placeholder",
    "Placement",
    "PlacementRow",
    "ResidentStore",
    "SequentialHook",
    "Timeline",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "align_module_device",
    "as_store",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_cpu_offload_hook",
    "attach_execution_device_hook",
    "attach_layerwise_casting_hooks",
    "dispatch",
    "dispatched",
    "execution_devices",
    "find_device",
    "get_parameter",
    "get_parameter_device",
    "get_state_dict_from_offload",
    "get_state_dict_offloaded_model",
    "has_offloaded_params",
    "placement",
    "refuse_contradictions",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
    "replace_method",
    "send_to_device",
    "show_device_map",
    "timeline",
    "undispatch",
    "update_parameter",
    "values_of",
]

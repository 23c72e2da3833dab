"""Decides where every weight shall live: exact sizes, ties, budgets, a map that wastes nothing, and the reasons for it."""

from __future__ import annotations

from .advice import Advice
from .conventional import fallback_allocate
from .cost import Prediction
from .device_maps import check_device_map, clean_device_map
from .hardware import Accelerator, find_accelerator
from .infer import infer_auto_device_map
from .memory import check_device_same, get_balanced_memory, get_max_memory
from .plan import DeviceUse, Plan
from .planner import plan
from .sizes import (
    CustomDtype,
    calculate_maximum_sizes,
    compute_module_sizes,
    compute_module_total_buffer_size,
    convert_file_size_to_int,
    dtype_byte_size,
    get_max_layer_size,
    get_module_leaves,
)
from .skeleton import Recorded, skeleton
from .ties import (
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    get_module_size_with_ties,
    retie_parameters,
)

__all__ = [
    "Accelerator",
    "Advice",
    "CustomDtype",
    "DeviceUse",
    "Plan",
    "Prediction",
    "Recorded",
    "calculate_maximum_sizes",
    "check_device_map",
    "check_device_same",
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "clean_device_map",
    "compute_module_sizes",
    "compute_module_total_buffer_size",
    "convert_file_size_to_int",
    "dtype_byte_size",
    "fallback_allocate",
    "find_accelerator",
    "get_balanced_memory",
    "get_max_layer_size",
    "get_max_memory",
    "get_module_leaves",
    "get_module_size_with_ties",
    "infer_auto_device_map",
    "plan",
    "retie_parameters",
    "skeleton",
]

"""The rest: waiting for the other processes, models out of their wrappers, compiled regions, files, ports, the kernel, bytes for people."""

from __future__ import annotations

from ..text import get_pretty_name
from ..training.compiling import compile_regions, has_compiled_regions, is_compiled_module
from ..training.config_file import write_basic_config
from ..training.environment import check_os_kernel, get_free_port, is_port_in_use
from ..training.memory import convert_bytes
from ..training.parallel import (
    clean_state_dict_for_safetensors,
    extract_model_from_parallel,
    get_module_children_bottom_up,
    load,
    merge_dicts,
    model_has_dtensor,
    recursive_getattr,
    save,
)
from ..training.state import wait_for_everyone

__all__ = [
    "check_os_kernel",
    "clean_state_dict_for_safetensors",
    "compile_regions",
    "convert_bytes",
    "extract_model_from_parallel",
    "get_free_port",
    "get_module_children_bottom_up",
    "get_pretty_name",
    "has_compiled_regions",
    "is_compiled_module",
    "is_port_in_use",
    "load",
    "merge_dicts",
    "model_has_dtensor",
    "recursive_getattr",
    "save",
    "wait_for_everyone",
    "write_basic_config",
]

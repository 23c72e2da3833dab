"""Environment variables, and which cores a process runs on."""

from __future__ import annotations

from ..training.environment import (
    clear_environment,
    convert_dict_to_env_variables,
    get_int_from_env,
    parse_choice_from_env,
    parse_flag_from_env,
    patch_environment,
    purge_accelerate_environment,
    str_to_bool,
)
from ..training.numa import override_numa_affinity, set_numa_affinity

__all__ = [
    "clear_environment",
    "convert_dict_to_env_variables",
    "get_int_from_env",
    "override_numa_affinity",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "purge_accelerate_environment",
    "set_numa_affinity",
    "str_to_bool",
]

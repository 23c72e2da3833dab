"""Sharded models and optimizers in files."""

from __future__ import annotations

from ..training.plugins.fsdp_functions import (
    disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading,
    load_fsdp_model,
    load_fsdp_optimizer,
    merge_fsdp_weights,
    save_fsdp_model,
    save_fsdp_optimizer,
)

__all__ = [
    "disable_fsdp_ram_efficient_loading",
    "enable_fsdp_ram_efficient_loading",
    "load_fsdp_model",
    "load_fsdp_optimizer",
    "merge_fsdp_weights",
    "save_fsdp_model",
    "save_fsdp_optimizer",
]

"""What transformers knows of DeepSpeed: whether models are built sharded, and generation and saving gather what is."""

from __future__ import annotations

import importlib.util
from typing import Any

from .package import transformers_module

__all__ = ["announce_deepspeed"]


def announce_deepspeed(config: Any) -> None:
    """Makes `is_deepspeed_zero3_enabled()` and `deepspeed_config()` of transformers answer by `config`, or say that there is none.

    Args:
        config: has `is_zero3()` and the dict `config`, and counts as long as somebody else holds it; None: nothing counts.

    Without transformers it does nothing.
    """
    if importlib.util.find_spec("transformers") is None:
        return
    module = transformers_module("integrations.deepspeed")
    if config is None:
        module.unset_hf_deepspeed_config()
    else:
        module.set_hf_deepspeed_config(config)

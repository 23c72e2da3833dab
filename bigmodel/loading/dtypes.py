"""Which dtype a tensor gets when it is loaded."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ..errors import PlanError
from ..protocols import TensorSpec
from ..text import listed
from .match import DtypeOf

__all__ = ["as_dtype", "dtype_rule"]


def as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """`torch.float16` for itself, `"float16"` and `"torch.float16"`. Raises `PlanError` (a ValueError) for anything else."""
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise PlanError(f"{dtype!r} is no dtype. Use one of torch's, such as torch.bfloat16 or 'bfloat16'.")
    return found


def dtype_rule(dtype: torch.dtype | str | None, keep_in_fp32_modules: str | Collection[str] | None = None) -> DtypeOf | None:
    """What `match` takes as `dtype_of`: floating tensors get `dtype`, others keep the model's own; None where `dtype` is None.

    With float16, tensors that have one of `keep_in_fp32_modules` among the components of their name stay in float32.
    """
    if dtype is None:
        return None
    wanted = as_dtype(dtype)
    kept = set(listed(keep_in_fp32_modules)) if wanted == torch.float16 else set()

    def rule(name: str, spec: TensorSpec, in_file: torch.dtype) -> torch.dtype:
        if not spec.dtype.is_floating_point:
            return spec.dtype
        return torch.float32 if kept.intersection(name.split(".")) else wanted

    return rule

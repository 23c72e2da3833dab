"""Whole parameters, for a while, where ZeRO stage 3 has cut them up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from .deepspeed_engine import deepspeed_module

__all__ = ["GatheredParameters"]


@contextlib.contextmanager
def GatheredParameters(
    params: torch.Tensor | Iterable[torch.Tensor],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Inside, parameters that ZeRO stage 3 has cut up are whole; all processes enter it. Other parameters are as they always are.

    Args:
        params: one or several.
        modifier_rank: whose changes all processes have afterwards; None: changes are lost.
        fwd_module: the module in whose forward they are used, if they are.
        enabled: False does nothing.
    """
    each: list[Any] = [params] if isinstance(params, torch.Tensor) else list(params)
    cut_up = [parameter for parameter in each if hasattr(parameter, "ds_id")]
    if not (enabled and cut_up):
        yield
        return
    with deepspeed_module().zero.GatheredParameters(cut_up, modifier_rank=modifier_rank, fwd_module=fwd_module):
        yield

"""A copy of the model in each process: placed, in its precision, its gradients averaged, compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..dispatch import LazyTensor, dispatched
from ..errors import TrainingError
from .compiling import compile_model
from .enums import PrecisionType
from .float8 import compute_in_float8
from .handlers import DistributedDataParallelKwargs
from .mixed_precision import get_mixed_precision_context_manager
from .nested import convert_outputs_to_fp32

if TYPE_CHECKING:
    from .accelerator import Accelerator

__all__ = ["averaged", "compute_in_precision", "prepare_copy", "spreads_over_devices", "sync_in_backward"]


def prepare_copy(accelerator: Accelerator, model: nn.Module, device_placement: bool, evaluation_mode: bool) -> nn.Module:
    """The model ready for forwards in this process, and unless `evaluation_mode` for gradients over all processes.

    What is dispatched stays where it is. Raises `TrainingError` where the trainable parts of such a model would have to be averaged, and
    for a model without values.
    """
    spread = spreads_over_devices(model) or any(dispatched(module) is not None for module in model.modules())
    has_others = accelerator.use_distributed and not evaluation_mode and any(map(_is_trained, model.parameters()))
    if spread and has_others:
        places = sorted({str(place) for place in getattr(model, "hf_device_map", {}).values()})
        raise TrainingError(
            f"{type(model).__name__} is dispatched to {places}, and {accelerator.num_processes} processes cannot average its gradients. "
            "Train it in one process, use a FullyShardedDataParallelPlugin on a model that is not dispatched, or prepare it with "
            "evaluation_mode=True."
        )
    compute_in_precision(accelerator, model)
    if device_placement:
        _refuse_empty(model)
        if spread:
            _place(model, accelerator.device)
        else:
            model.to(accelerator.device)
    if has_others and not isinstance(model, DistributedDataParallel):
        model = averaged(accelerator, model)
    plugin = accelerator.state.dynamo_plugin
    return model if plugin is None else compile_model(model, plugin)


def spreads_over_devices(model: nn.Module) -> bool:
    """Whether the device map of the model, or of a part of it, has several devices."""
    return any(len({str(place) for place in getattr(module, "hf_device_map", {}).values()}) > 1 for module in model.modules())


def _refuse_empty(model: nn.Module) -> None:
    state = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, torch.Tensor)}
    empty = [name for name, tensor in state.items() if tensor.device.type == "meta" and not isinstance(tensor, LazyTensor)]
    if empty:
        raise TrainingError(
            f"{type(model).__name__} has no values for {len(empty)} tensors (they are on meta): {', '.join(empty[:10])}. "
            "Load a checkpoint into it first, with bigmodel.load_checkpoint_and_dispatch or load_checkpoint_in_model."
        )


def _place(module: nn.Module, device: torch.device) -> None:
    """Moves what is not dispatched."""
    if dispatched(module) is not None or "hf_device_map" in module.__dict__:
        return
    for parameter in module.parameters(recurse=False):
        parameter.data = parameter.data.to(device)
    for name, buffer in module.named_buffers(recurse=False):
        module._buffers[name] = buffer.to(device)
    for child in module.children():
        _place(child, device)


def _is_trained(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and not isinstance(parameter, LazyTensor)  # offloaded weights are frozen


def compute_in_precision(accelerator: Accelerator, model: nn.Module) -> None:
    """Forwards of the model run under autocast and give their outputs in float32, where the accelerator's precision is a half one."""
    if not accelerator.native_amp:
        return
    if accelerator.mixed_precision == PrecisionType.FP8:
        compute_in_float8(model)
    # A model that was prepared before, by an Accelerator of other settings, has its own forward there.
    forward = model.__dict__.get("_original_forward", model.forward)
    autocast: Any = get_mixed_precision_context_manager(True, accelerator.autocast_handler)
    inner = getattr(forward, "__func__", None)
    if inner is None:  # a function that somebody has set on the instance
        model.forward = convert_outputs_to_fp32(autocast(forward))
    else:
        model.forward = MethodType(convert_outputs_to_fp32(autocast(inner)), model)
    # What `extract_model_from_parallel(keep_fp32_wrapper=False)` puts back.
    model._original_forward = forward


def averaged(accelerator: Accelerator, model: nn.Module, group: Any = None) -> DistributedDataParallel:
    """The model with gradients averaged over a group of processes (None: all), as the accelerator's `DistributedDataParallelKwargs` say."""
    handler = accelerator.ddp_handler or DistributedDataParallelKwargs()
    device = accelerator.device
    places: dict[str, Any] = {}
    if device.type != "cpu" and next(model.parameters()).device.type != "cpu":
        places = {"device_ids": [device.index], "output_device": device.index}
    wrapped = DistributedDataParallel(model, process_group=group, **places, **handler.to_kwargs())
    handler.register_comm_hook(wrapped)
    return wrapped


@contextlib.contextmanager
def sync_in_backward(model: nn.Module) -> Iterator[None]:
    """Backwards inside average gradients of a `DistributedDataParallel`, although their forward was inside `no_sync`."""
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    before = model.require_backward_grad_sync, model.require_forward_param_sync
    model.require_backward_grad_sync = model.require_forward_param_sync = True
    # What a forward outside of `no_sync` does last.
    model.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        model.require_backward_grad_sync, model.require_forward_param_sync = before

"""The functions that hook every module below one, for scripts that place hooks by themselves."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from ..text import listed
from .align import AlignDevicesHook
from .cut import registered_tensors
from .hooks import add_hook_to_module
from .offload import Prefixed
from .schedule import Schedule

__all__ = ["attach_align_device_hook", "attach_align_device_hook_on_blocks", "attach_execution_device_hook"]


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Any,
    skip_keys: str | Collection[str] | None = None,
    preload_module_classes: str | Collection[str] | None = None,
    tied_params_map: dict[int, dict[Any, torch.Tensor]] | None = None,
) -> None:
    """Makes every module that holds tensors and has no hook yet run on `execution_device`; below preloaded classes nothing is added."""
    if not hasattr(module, "_hf_hook") and len(module.state_dict()) > 0:
        add_hook_to_module(module, AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map))
    if type(module).__name__ in listed(preload_module_classes):
        return
    for child in module.children():
        attach_execution_device_hook(child, execution_device, skip_keys, preload_module_classes, tied_params_map)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Any = None,
    offload: bool = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Collection[str] | None = None,
    preload_module_classes: str | Collection[str] | None = None,
    tied_params_map: dict[int, dict[Any, torch.Tensor]] | None = None,
) -> None:
    """Adds an `AlignDevicesHook` to every module, from `module` down, that holds tensors of its own.

    Modules of a preloaded class get one hook for all tensors below them when offloading. `weights_map` is looked up with names that begin
    with `module_name`. The modules share one schedule, so that each fetches the next one's weights.
    """
    schedule = Schedule()
    ties = {id(tensor.tensor): tensor.owners for tensor in registered_tensors(module) if len(tensor.owners) > 1}
    for name, part, preloaded in _parts(module, module_name, offload, preload_module_classes):
        hook = AlignDevicesHook(
            execution_device=execution_device,
            offload=offload,
            weights_map=None if weights_map is None else Prefixed(weights_map, f"{name}." if name else ""),
            offload_buffers=offload_buffers,
            place_submodules=preloaded,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
        )
        hook.join(schedule, ties)
        add_hook_to_module(part, hook, append=True)


def _parts(
    module: nn.Module, name: str, offload: bool, preload_module_classes: str | Collection[str] | None
) -> Iterator[tuple[str, nn.Module, bool]]:
    preloaded = offload and type(module).__name__ in listed(preload_module_classes)
    if preloaded or any(True for _ in module.parameters(recurse=False)) or any(True for _ in module.buffers(recurse=False)):
        yield name, module, preloaded
    if not preloaded:
        for child_name, child in module.named_children():
            yield from _parts(child, f"{name}.{child_name}" if name else child_name, offload, preload_module_classes)


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Any = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Collection[str] | None = None,
    preload_module_classes: str | Collection[str] | None = None,
    tied_params_map: dict[int, dict[Any, torch.Tensor]] | None = None,
) -> None:
    """Hooks blocks: `execution_device` and `offload` are one value for the whole module, or mappings from names of blocks to values.

    A block that is not offloaded is placed on its device and runs there. An offloaded one gets hooks at all its modules that hold tensors.
    The module itself returns its outputs on the device of its inputs.
    """
    if not isinstance(execution_device, Mapping) and not isinstance(offload, Mapping):
        if offload:
            attach_align_device_hook(
                module,
                execution_device,
                True,
                weights_map,
                offload_buffers,
                module_name,
                skip_keys,
                preload_module_classes,
                tied_params_map,
            )
        else:
            hook = AlignDevicesHook(
                execution_device=execution_device,
                io_same_device=True,
                skip_keys=skip_keys,
                place_submodules=True,
                tied_params_map=tied_params_map,
            )
            add_hook_to_module(module, hook)
        return
    devices = (
        execution_device if isinstance(execution_device, Mapping) else dict.fromkeys(cast(Mapping[str, bool], offload), execution_device)
    )
    offloads = offload if isinstance(offload, Mapping) else dict.fromkeys(devices, offload)
    blocks = [(name, part) for name, part in _named_parts(module, module_name) if name in devices and name in offloads]
    for name, part in blocks:
        hook = AlignDevicesHook(
            execution_device=devices[name],
            offload_buffers=offload_buffers,
            io_same_device=name == "",
            place_submodules=not offloads[name],
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
        )
        if not offloads[name]:
            add_hook_to_module(part, hook)
            continue
        attach_align_device_hook(
            part, devices[name], True, weights_map, offload_buffers, name, skip_keys, preload_module_classes, tied_params_map
        )
        if not hasattr(part, "_hf_hook"):
            add_hook_to_module(part, hook)
    # The innermost blocks first: what an outer one adds must not take their place.
    for name, part in reversed(blocks):
        attach_execution_device_hook(part, devices[name], skip_keys, preload_module_classes if offloads[name] else None, tied_params_map)
    if module_name == "" and "" not in dict(blocks):
        root = AlignDevicesHook(execution_device=devices.get(""), io_same_device=True, skip_keys=skip_keys, tied_params_map=tied_params_map)
        add_hook_to_module(module, root, append=True)


def _named_parts(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, part in module.named_modules():
        yield f"{prefix}.{name}" if prefix and name else prefix or name, part

"""Budgets: the bytes that each device offers, given by the caller or measured."""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from ..constants import MiB
from ..devices import DeviceKey, accelerators, as_key, available_host_bytes, device_memory, machine_text
from ..errors import PlanError
from ..modules import class_names
from .sizes import DtypeLike, compute_module_sizes, convert_file_size_to_int, get_module_leaves

__all__ = ["check_device_same", "get_balanced_memory", "get_max_memory", "measured_budgets", "parse_budgets"]

logger = logging.getLogger(__name__)

ACCELERATOR_SHARE = 0.95
"""Part of an accelerator's free memory that a measured budget offers: the rest is for activations, workspaces and the allocator."""
HOST_SHARE = 0.90
"""Part of the available RAM that a measured budget offers: the rest is for the process, staging memory and the page cache."""

_TIERS: tuple[DeviceKey, ...] = ("mps", "cpu", "disk")


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Whether both name the same device; an accelerator without an index is the one of index 0."""
    if first_device.type != second_device.type:
        return False
    return first_device.type == "cpu" or (first_device.index or 0) == (second_device.index or 0)


def _free_accelerator_bytes() -> dict[DeviceKey, tuple[int, int]]:
    """Free and total bytes by key; a device that cannot be asked is logged and left out."""
    found: dict[DeviceKey, tuple[int, int]] = {}
    for device in accelerators():
        try:
            torch.empty(0, device=device)  # the driver answers for this process only once it has a context
            found[as_key(device)] = device_memory(device)
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            logger.info("Device %s gives no figures about its memory (%s): left out.", device, error)
    return found


def _shares_host_memory(device: torch.device) -> bool:
    if device.type == "mps":
        return True
    properties: Any = getattr(torch.get_device_module(device), "get_device_properties", None)
    return properties is not None and bool(getattr(properties(device), "is_integrated", False))


def get_max_memory(max_memory: MutableMapping[Any, Any] | None = None) -> dict[Any, int]:
    """Bytes per device: those given (strings such as "20GiB" become ints, in the caller's dict too), or else what is free now.

    Accelerators come first by index, then "mps", "cpu", "disk". A dict that is given is not completed with devices that it lacks.
    Without one: the free bytes of each accelerator, and the available RAM as "cpu" unless an accelerator lives in the same memory.
    Raises `PlanError` (a ValueError) for an unknown device or a size that cannot be read.
    """
    if max_memory is None:
        budgets: dict[Any, int] = {key: free for key, (free, _) in _free_accelerator_bytes().items()}
        if not any(_shares_host_memory(device) for device in accelerators()):
            budgets["cpu"] = available_host_bytes()
        return budgets
    for key, size in budget_items(max_memory):
        nbytes = _budget_bytes(key, size)
        if isinstance(size, str):
            max_memory[key] = nbytes
    indices: list[Any] = sorted(key for key in max_memory if not isinstance(key, bool) and isinstance(key, numbers.Integral))
    for key in max_memory:
        if key not in indices and key not in _TIERS:
            raise PlanError(f"Device {key} is not recognized, available devices are integers(for GPU/XPU), 'mps', 'cpu' and 'disk'")
    count = len(accelerators())
    for index in indices:
        if not 0 <= index < count:
            logger.warning("Device %s is not available, available devices are %s", index, list(range(count)))
    budgets = {int(index): int(max_memory[index]) for index in indices}
    return budgets | {tier: int(max_memory[tier]) for tier in _TIERS if tier in max_memory}


def budget_items(max_memory: Any) -> list[tuple[Any, Any]]:
    """Devices and what they offer. Raises `PlanError` where `max_memory` is no mapping."""
    if not isinstance(max_memory, Mapping):
        raise PlanError(f"max_memory={max_memory!r} says of no device what it offers. Give a dict, such as {{0: '24GiB', 'cpu': '64GiB'}}.")
    return list(max_memory.items())


def _budget_bytes(device: object, size: Any) -> int:
    """Bytes of one budget. Raises `PlanError`, naming the device, for what is no number of bytes >= 0."""
    is_number = isinstance(size, numbers.Real) and size is not True and size is not False  # numpy's and computed ones too
    if is_number:
        if not 0 <= size < math.inf:  # neither is NaN
            raise PlanError(f"Budget of device {device!r}: {size} is not a number of bytes. Give an int >= 0, or a string such as '20GiB'.")
        return int(size)
    try:
        return convert_file_size_to_int(size)
    except PlanError as error:
        raise type(error)(f"Budget of device {device!r}: {error}") from error


def parse_budgets(max_memory: Mapping[Any, Any]) -> dict[DeviceKey, int]:
    """Budgets in any spelling (`{"cuda:0": "2GiB", torch.device("cpu"): 10**9}`) as bytes by key, in device order; the dict is not changed.

    Raises `PlanError` for an unknown device, a size that cannot be read, and one device under two spellings.
    """
    budgets: dict[DeviceKey, int] = {}
    for name, size in budget_items(max_memory):
        key = as_key(name, where="in max_memory")
        if isinstance(key, str) and key not in _TIERS:
            raise PlanError(
                f"Device {name!r} in max_memory is not recognized: {machine_text()}. Use an accelerator's index, 'cpu' or 'disk' (an index "
                "may be planned for without being there)."
            )
        if key in budgets:
            raise PlanError(f"Device {key!r} stands twice in max_memory, the second time as {name!r}. Give it one budget.")
        budgets[key] = _budget_bytes(key, size)
    indices = sorted(key for key in budgets if isinstance(key, int))
    return {key: budgets[key] for key in [*indices, *(tier for tier in _TIERS if tier in budgets)]}


def _rounded_share(free_bytes: int, total_bytes: int, share: float) -> int:
    """`share` of what is free, rounded down to a power of two near 1/128 of the device, so that small changes in use do not change it."""
    step_bytes = 1 << max(0, (total_bytes // 128).bit_length() - 1)
    return int(free_bytes * share) // step_bytes * step_bytes


def measured_budgets() -> dict[DeviceKey, int]:
    """What this machine offers: 95 % of each accelerator's free memory and 90 % of the available RAM (within the container's limit).

    Each is rounded down to a step of about 1/128 of the device, so that the same machine gives the same plan while other programs come
    and go a little.
    "disk" gets no limit, whatever is free there: what rests on disk is the checkpoint itself, and nothing is written.
    """
    budgets = {key: _rounded_share(free, total, ACCELERATOR_SHARE) for key, (free, total) in _free_accelerator_bytes().items()}
    if not any(_shares_host_memory(device) for device in accelerators()):
        free, total = device_memory(torch.device("cpu"))
        budgets["cpu"] = _rounded_share(free, max(total, 128 * MiB), HOST_SHARE)
    return budgets


def get_balanced_memory(
    model: nn.Module,
    max_memory: MutableMapping[Any, Any] | None = None,
    no_split_module_classes: str | Collection[str] | None = None,
    dtype: DtypeLike | None = None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
    low_zero: bool = False,
) -> dict[Any, int]:
    """Budgets lowered so that a map filled in order uses all accelerators about equally; "cpu" and "disk" are left as they are.

    Every accelerator but the last offers its even share of the model plus 1.25 × the bigger of one block and the mean leaf. With
    `low_zero` the first one only offers what the others cannot take. With one accelerator and no `max_memory`, 90 % of its free bytes.
    """
    user_gave_budgets = max_memory is not None
    budgets = get_max_memory(max_memory)
    usable = [key for key in budgets if key not in ("cpu", "disk") and budgets[key] > 0]
    if not usable:
        return budgets
    if len(usable) == 1:
        if not user_gave_budgets:
            budgets[usable[0]] = int(budgets[usable[0]] * 0.9)
        return budgets

    sizes = compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes)
    share_bytes = sizes[""] // (len(usable) - 1 if low_zero else len(usable))
    share_bytes += int(1.25 * max(_largest_block_bytes(model, sizes, no_split_module_classes), _mean_leaf_bytes(model, sizes)))
    first, *_, last = usable
    for key in usable:
        if key != last and not (low_zero and key == first):
            budgets[key] = min(share_bytes, budgets[key])
    if low_zero:
        others_bytes = sum(budgets[key] for key in usable[1:])
        budgets[first] = min(max(0, sizes[""] - others_bytes), budgets[first])
    return budgets


def _largest_block_bytes(model: nn.Module, sizes: Mapping[str, int], no_split_module_classes: str | Collection[str] | None) -> int:
    """The biggest of the first modules found of each block class, the model itself left out."""
    first: dict[str, int] = {}
    classes = class_names(no_split_module_classes)
    for name, module in model.named_modules():
        if name and type(module).__name__ in classes:
            first.setdefault(type(module).__name__, sizes.get(name, 0))
    return max(first.values(), default=0)


def _mean_leaf_bytes(model: nn.Module, sizes: Mapping[str, int]) -> int:
    """The mean size of the modules without children that hold tensors."""
    tensors = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    leaves = get_module_leaves([name for name in sizes if name not in tensors])
    return sum(sizes[name] for name in leaves) // max(1, len(leaves))

"""A model sharded by `fully_shard`: every process keeps a part of each parameter, and gathers whole units when they run."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ...errors import TrainingError
from ..checkpoint_folder import together
from ..nested import recursively_apply
from ..parallelism import ParallelismConfig
from ..state import PartialState
from .fsdp import FullyShardedDataParallelPlugin
from .fsdp_units import ignored_modules, owners_of, units_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["average_in_backward", "mesh_for", "shard_model"]


def mesh_for(plugin: FullyShardedDataParallelPlugin, parallelism: ParallelismConfig | None = None) -> DeviceMesh:
    """All processes in one row, along which parameters are sharded; in two dimensions (copies, parts) where they are copied as well.

    How many copies there are is what `parallelism` says; None: what the plugin's strategy says.

    Raises `TrainingError` where hosts have different numbers of processes, which `HYBRID_SHARD` shards over.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import ShardingStrategy

    state = PartialState()
    world, kind = state.num_processes, state.device.type
    if parallelism is not None:
        copies, parts = parallelism.sharding()
        if copies == 1:
            return init_device_mesh(kind, (parts,), mesh_dim_names=("parts",))
        return init_device_mesh(kind, (copies, parts), mesh_dim_names=("copies", "parts"))
    strategy = plugin.sharding_strategy
    if strategy == ShardingStrategy.NO_SHARD:
        return init_device_mesh(kind, (world, 1), mesh_dim_names=("copies", "parts"))
    if strategy not in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2):
        return init_device_mesh(kind, (world,), mesh_dim_names=("parts",))
    local = state.local_num_processes
    if world % local:
        raise TrainingError(f"{plugin.sharding_strategy}: {world} processes, {local} of them on this host: hosts need as many each.")
    return init_device_mesh(kind, (world // local, local), mesh_dim_names=("copies", "parts"))


def shard_model(model: nn.Module, plugin: FullyShardedDataParallelPlugin, mesh: DeviceMesh) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Shards the model in place, as the plugin says. All processes call it with the same model.

    Returns for every parameter that was replaced the old one and the new one.

    Raises:
        TrainingError: parameters on meta that nothing fills, and settings that do not fit the model.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    device = PartialState().device
    ignored = ignored_modules(model, plugin)
    units = units_of(model, plugin, ignored)
    if plugin.activation_checkpointing and not units:
        raise TrainingError(
            "activation_checkpointing=True recomputes wrapped modules, and none is wrapped: choose them by "
            "auto_wrap_policy='transformer_based_wrap'."
        )
    before = dict(model.named_parameters())
    if plugin.param_init_fn is not None and not plugin.sync_module_states:
        for module in model.modules():
            if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
                plugin.param_init_fn(module)
    filling = _Filling(model, device, bool(plugin.sync_module_states))
    for module in ignored:
        filling.fill(module)
        module.to(device)
    offload = plugin.cpu_offload
    if isinstance(offload, CPUOffloadPolicy) and device.type == "cpu":
        offload = CPUOffloadPolicy(pin_memory=False)  # nothing copies from there
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": plugin.mixed_precision_policy or MixedPrecisionPolicy(),
        "offload_policy": offload,
        "ignored_params": {parameter for module in ignored for parameter in module.parameters()},
    }
    for unit in units:
        filling.fill(unit)
        if plugin.activation_checkpointing:
            _recompute(unit, bool(plugin.activation_checkpointing_offload), device)
        fully_shard(unit, reshard_after_forward=bool(plugin.reshard_after_forward), **options)
    filling.fill(model)
    # The root's parameters are needed again at once, when the backward begins: None frees those of inner units alone.
    fully_shard(model, reshard_after_forward=None if plugin.reshard_after_forward else False, **options)
    if plugin.forward_prefetch:
        in_order = [module for module in model.modules() if any(module is unit for unit in units)]
        for unit, following in itertools.pairwise(in_order):
            unit.set_modules_to_forward_prefetch([following])  # type: ignore[operator]
    if hasattr(model, "generate"):
        register_fsdp_forward_method(model, "generate")
    after = dict(model.named_parameters())
    return [(old, after[name]) for name, old in before.items() if after[name] is not old]


class _Filling:
    """Values for parameters before they are sharded: the main process's, unit by unit, or else those that are there."""

    def __init__(self, model: nn.Module, device: torch.device, from_main: bool):
        self._owners = owners_of(model)
        self._device = device
        self._from_main = from_main
        self._filled: set[int] = set()
        empty = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
        with together("Preparing a model"):
            if empty and (PartialState().is_main_process or not from_main):
                where = "in the main process, whose values all take" if from_main else "and sync_module_states does not fill them"
                raise TrainingError(
                    f"{type(model).__name__} has {len(empty)} tensors on meta {where}: {', '.join(empty[:10])}. Load the model before it "
                    "is prepared, or give the plugin cpu_ram_efficient_loading=True where the main process alone has loaded it."
                )
        if from_main:
            for module in model.modules():
                for key, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[key] = self._sent(buffer)

    def fill(self, module: nn.Module) -> None:
        """Sends the parameters of a module that no unit holds yet."""
        from torch.distributed.tensor import DTensor

        if not self._from_main:
            return
        for parameter in list(module.parameters()):
            if isinstance(parameter, DTensor) or id(parameter) in self._filled:
                continue
            values = self._sent(parameter.data)
            if parameter.is_meta:
                made = nn.Parameter(values, requires_grad=parameter.requires_grad)
                for owner, key in self._owners[id(parameter)]:
                    owner._parameters[key] = made
                self._filled.add(id(made))
            else:
                parameter.data = values
                self._filled.add(id(parameter))

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        made = (
            torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device) if tensor.is_meta else tensor.to(self._device).contiguous()
        )
        dist.broadcast(made, src=0)
        return made


def _recompute(unit: nn.Module, offload: bool, device: torch.device) -> None:
    """The unit's forward keeps what it is given, on the host if `offload`, and runs again in the backward."""
    from torch.utils.checkpoint import checkpoint

    forward = unit.forward

    def on_device(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = recursively_apply(lambda tensor: tensor.to(device), (args, kwargs))
        return forward(*args, **kwargs)

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if offload and device.type != "cpu":
            args, kwargs = recursively_apply(lambda tensor: tensor.to("cpu"), (args, kwargs))
            return checkpoint(on_device, *args, use_reentrant=False, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    unit.forward = recomputed


def average_in_backward(parameter: nn.Parameter, synchronizes: Callable[[], bool]) -> None:
    """The gradient of a parameter that is not sharded becomes the mean over processes, in backwards in which `synchronizes()`."""

    def average(parameter: torch.Tensor) -> None:
        if synchronizes() and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())

    parameter.register_post_accumulate_grad_hook(average)

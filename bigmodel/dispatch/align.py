"""AlignDevicesHook: what makes a module run on its execution device, with its arguments there and its weights brought for the forward."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from ..devices import accelerator_type, as_device
from ..errors import DispatchError
from ..modules import get_non_persistent_buffers, named_module_tensors, owner_of
from ..protocols import Store
from .group import Group
from .hooks import ModelHook, outside_compilation
from .layout import Owner
from .lazy import LazyTensor
from .movement import Moves, find_device, is_tensor_on, move
from .offload import Resting, WeightsMap, make_group, restore, set_tensor
from .recall import recalled
from .schedule import Schedule
from .stores import as_store
from .tracing import refuse_tracing

__all__ = ["AlignDevicesHook", "as_torch_device", "move_tensors"]


def as_torch_device(device: Any) -> torch.device:
    """A torch device from what callers write: an index, a string, a torch device (also `meta`)."""
    return device if isinstance(device, torch.device) else as_device(device)


def move_tensors(module: nn.Module, device: torch.device, *, recurse: bool) -> None:
    """Brings the real tensors of a module to `device` in place; ties stay ties, offloaded ones stay where they rest."""
    moved: dict[int, torch.Tensor] = {}
    for part in module.modules() if recurse else [module]:
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                if tensor is None or isinstance(tensor, LazyTensor) or is_tensor_on(tensor, device):
                    continue
                known = moved.get(id(tensor))
                if known is None:
                    known = moved[id(tensor)] = _moved(tensor, device)
                table[name] = known  # type: ignore[assignment]


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if type(tensor) is nn.Parameter and tensor.device.type != "meta" and device.type != "meta":
        tensor.data = tensor.data.to(device)  # the same object: optimizers, ties and references go on to mean it
        return tensor
    with torch.no_grad():
        value = tensor.to(device)
    if isinstance(tensor, nn.Parameter) and not isinstance(value, nn.Parameter):
        return nn.Parameter(value, tensor.requires_grad)
    return value


class AlignDevicesHook(ModelHook):
    """Runs a module on its execution device.

    Args:
        execution_device: where the module runs; its arguments are moved there. None leaves them.
        offload: whether the module's weights rest elsewhere and come for each forward.
        io_same_device: whether the output goes back to the device of the first input tensor. May be changed at any time.
        weights_map: names (relative to the module) → tensors, where the offloaded weights rest; by default their copies on CPU.
        offload_buffers: whether persistent buffers are offloaded too; otherwise they stay on the execution device.
        place_submodules: whether this concerns all tensors below the module, not only its own.
        skip_keys: names of arguments (positional ones too), and of keys in nested dicts, that are not moved.
        tied_params_map: kept for libraries that look at it; ties are found by themselves.

    Offloaded weights are placeholders between forwards: reading one outside the forward fetches it.
    """

    is_traced = False
    is_begun_anew = False

    def __init__(
        self,
        execution_device: Any = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, torch.Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | Collection[str] | None = None,
        tied_params_map: dict[int, dict[Any, torch.Tensor]] | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}
        self.param_original_devices: dict[str, torch.device] = {}
        self.buffer_original_devices: dict[str, torch.device] = {}
        self.tied_params_names: set[str] = set()
        self._schedule: Schedule | None = None
        self._groups: list[Group] = []
        self._at_rest: list[Group] = []
        self._around: torch.device | None = None
        self._ties: Mapping[int, list[Owner]] = {}
        self._prepared = False
        self._positions: tuple[str, ...] | None = None
        self._calls: dict[int, list[tuple[torch.device | None, Moves | None, Any]]] = {}

    def __repr__(self) -> str:
        return (
            f"AlignDevicesHook(execution_device={self.execution_device}, offload={self.offload}, io_same_device={self.io_same_device}, "
            f"offload_buffers={self.offload_buffers}, place_submodules={self.place_submodules}, skip_keys={self.skip_keys!r})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> AlignDevicesHook:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(self.__dict__)
        made._calls = {}
        made._schedule = deepcopy(self._schedule, memo)
        made._groups = [deepcopy(group, memo) for group in self._groups]
        made._at_rest = [deepcopy(group, memo) for group in self._at_rest]
        if isinstance(self.weights_map, WeightsMap):
            made.weights_map = deepcopy(self.weights_map, memo)
        if made._schedule is not None:
            made._schedule.add(*made._groups, *made._at_rest)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise DispatchError(
            "A dispatched model cannot be pickled: its hooks belong to this process. Save its state_dict() (values included), "
            "or undispatch the model first."
        )

    @property
    def groups(self) -> list[Group]:
        """The groups of weights that this hook brings for its module's forward."""
        return list(self._groups)

    def join(self, schedule: Schedule, ties: Mapping[int, list[Owner]]) -> None:
        """Makes the hook's weights part of a schedule that others share; to be called before the hook is added.

        `ties` tells, by the tensor's id, where else a tensor is registered: such a tensor is a group of its own, which all its users bring.
        """
        self._schedule = schedule
        self._ties = ties

    def prepare(
        self,
        schedule: Schedule,
        groups: Sequence[Group],
        at_rest: Sequence[Group],
        module: nn.Module,
        path: str,
        around: torch.device | None = None,
    ) -> None:
        """Makes this the hook of weights that were taken out already: `groups` come for each forward, those `at_rest` only when read.

        `path` is the name of `module` in the model. `around` is the device that the module around it runs on: where outputs go with
        `io_same_device` if no tensor was put in.
        """
        self._around = around
        self._schedule = schedule
        self._groups = list(groups)
        self._at_rest = list(at_rest)
        self.weights_map = WeightsMap(module, path)
        self._prepared = True

    def init_hook(self, module: nn.Module) -> nn.Module:
        self._positions = None
        if self._prepared:
            return module
        if not self.offload:
            if self.execution_device is not None:
                device = as_torch_device(self.execution_device)
                move_tensors(module, device, recurse=self.place_submodules)
            return module
        self._take_out(module)
        return module

    def _take_out(self, module: nn.Module) -> None:
        """Offloads the module's own tensors (all below it with `place_submodules`) into one group."""
        recurse = self.place_submodules
        tensors = dict(named_module_tensors(module, recurse=recurse))
        self.original_devices = {name: tensor.device for name, tensor in tensors.items()}
        buffers = {name for name, _ in module.named_buffers(recurse=recurse)}
        staying = buffers if not self.offload_buffers else get_non_persistent_buffers(module, recurse=recurse, fqns=True)
        self.param_original_devices = {name: device for name, device in self.original_devices.items() if name not in buffers}
        self.buffer_original_devices = {name: device for name, device in self.original_devices.items() if name in buffers}
        leaving = [name for name in tensors if name not in staying]
        if self.weights_map is None:
            self.weights_map = {name: tensors[name].detach().to("cpu") for name in leaving if not isinstance(tensors[name], LazyTensor)}
        if self.execution_device is not None:
            device = as_torch_device(self.execution_device)
        else:
            device = next((tensor.device for tensor in tensors.values() if tensor.device.type != "meta"), torch.device("cpu"))
        store: Store = as_store(self.weights_map)
        known = set(store.names())
        aliases: dict[int, list[str]] = {}
        for name, tensor in list(module.named_parameters(recurse=recurse, remove_duplicate=False)) + list(
            module.named_buffers(recurse=recurse, remove_duplicate=False)
        ):
            aliases.setdefault(id(tensor), []).append(name)
        if self._schedule is None:
            self._schedule = Schedule(prefetch=False)
        pool, tally = self._schedule.pool(device), self._schedule.tally
        own: list[Resting] = []
        self._groups = []
        for name in leaving:
            tensor = tensors[name]
            shared = self._schedule.tied(tensor)
            if shared is not None:
                self._groups.append(shared)
                continue
            names = aliases[id(tensor)]
            key = next((alias for alias in names if alias in known), None)
            if key is None and not isinstance(tensor, LazyTensor):
                raise DispatchError(f"The weights map has no {name!r}, which is to be offloaded. It has: {', '.join(sorted(known)[:5])} …")
            owners = [Owner(*owner_of(module, alias), name in buffers) for alias in names]
            everywhere = self._ties.get(id(tensor), owners)
            resting = Resting(name, everywhere, tensor, None if key is None else store, key or "")
            if len(everywhere) > len(owners):
                self._groups.append(make_group(name, [resting], pool, tally))
            else:
                own.append(resting)
        if own:
            self._groups.insert(0, make_group("", own, pool, tally))
        self._ties = {}
        self._schedule.add(*self._groups)
        moved: dict[int, torch.Tensor] = {}
        for name in staying:
            if name in tensors and tensors[name].device.type != "meta" and not isinstance(tensors[name], LazyTensor):
                tensor = tensors[name]
                value = moved.setdefault(id(tensor), tensor.to(device))
                set_tensor([Owner(*owner_of(module, alias), True) for alias in aliases[id(tensor)]], value)

    @outside_compilation
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._look_after(module)
        if self._groups or self._at_rest:
            refuse_tracing(type(module).__name__)
        input_device = find_device((args, kwargs)) if self.io_same_device else None
        self.input_device = input_device
        moves = None
        entered = 0
        try:
            for group in self._groups:
                assert self._schedule is not None
                self._schedule.enter(group)
                entered += 1
            if self.execution_device is not None and not _are_all_on(self.execution_device, args, kwargs) and self._moving():
                moves = Moves()
                args, kwargs = self._arguments(module, args, kwargs, moves)
        except BaseException:
            for group in reversed(self._groups[:entered]):
                group.exit()
            self._abort()
            raise
        for group in self._at_rest:
            group.begin_lookup()
        recall = recalled(self._groups)
        if recall is not None:
            recall.__enter__()
        self._calls.setdefault(threading.get_ident(), []).append((input_device, moves, recall))
        return args, kwargs

    @outside_compilation
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        input_device, moves, recall = self._pop()
        if recall is not None:
            recall.__exit__()
        self._exit_groups()
        if moves is not None:
            moves.write_back()
        output_device = input_device if input_device is not None else self._around
        if self.io_same_device and output_device is not None:
            output = move(output, output_device, self._skipped)
        return output

    @outside_compilation
    def forward_failed(self, module: nn.Module) -> None:
        _, _, recall = self._pop()
        if recall is not None:
            recall.__exit__()
        self._exit_groups()
        self._abort()

    def detach_hook(self, module: nn.Module) -> nn.Module:
        groups = self._groups + self._at_rest
        restore(groups)
        self._groups, self._at_rest, self._prepared = [], [], False
        if self._schedule is not None:
            self._schedule.remove(*groups)
        return module

    def release(self) -> None:
        """Lets go of the groups, whose weights stay placeholders."""
        self._groups, self._at_rest, self._prepared, self._schedule = [], [], False, None

    # --- Inside ---

    def _look_after(self, module: nn.Module) -> None:
        """What a subclass does with the module before each forward."""

    @property
    def _skipped(self) -> tuple[str, ...]:
        return (self.skip_keys,) if isinstance(self.skip_keys, str) else tuple(self.skip_keys or ())

    def _moving(self) -> bool:
        """Whether an argument could be anywhere else: without an accelerator everything is on CPU."""
        return accelerator_type() is not None or self.execution_device == torch.device("meta")

    def _arguments(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], moves: Moves
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        device = as_torch_device(self.execution_device)
        skipped = self._skipped
        if not skipped:
            args = tuple([move(value, device, (), moves) for value in args])
        else:
            if self._positions is None:
                try:
                    self._positions = tuple(inspect.signature(module.forward).parameters)
                except (TypeError, ValueError):  # a forward in C has no signature
                    self._positions = ()
            names = self._positions
            args = tuple(
                [
                    value if index < len(names) and names[index] in skipped else move(value, device, skipped, moves)
                    for index, value in enumerate(args)
                ]
            )
        return args, {name: value if name in skipped else move(value, device, skipped, moves) for name, value in kwargs.items()}

    def _pop(self) -> tuple[torch.device | None, Moves | None, Any]:
        thread = threading.get_ident()
        stack = self._calls.get(thread)
        if not stack:
            raise DispatchError("post_forward was called without a pre_forward before it.")
        call = stack.pop()
        if not stack:
            del self._calls[thread]
        return call

    def _exit_groups(self) -> None:
        for group in reversed(self._groups):
            group.exit()
        for group in self._at_rest:
            group.end_lookup()

    def _abort(self) -> None:
        if self._schedule is not None:
            self._schedule.abort()


def _are_all_on(device: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether arguments are plain tensors on `device`, as most are: asking for the machine's accelerator takes as long as a tiny layer."""
    return not kwargs and not any(type(value) is not torch.Tensor or value.device != device for value in args)

"""Questions to a dispatched model (where does everything live?), and single weights: read one, replace one, bring one for a while."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import DispatchError
from ..modules import owner_of
from ..text import bytes_text
from .align import AlignDevicesHook, as_torch_device
from .cut import registered_tensors
from .engine import dispatched
from .group import Counters, Group
from .hooks import hooks_of
from .lazy import LazyTensor
from .offload import swap_in_values
from .recording import Timeline, record

__all__ = [
    "Placement",
    "PlacementRow",
    "align_module_device",
    "get_parameter",
    "get_parameter_device",
    "placement",
    "timeline",
    "update_parameter",
    "values_of",
]


@dataclass(frozen=True, slots=True)
class PlacementRow:
    """A module whose tensors share one place."""

    name: str
    rests: str
    """A device, or the kind of store (`"cpu"`, `"disk"`) that keeps the bytes between forwards."""
    runs: str
    """The device of its arithmetic."""
    tensors: int
    nbytes: int
    counters: Counters | None = None
    """None for what is resident."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model's tensors are, and what bringing them has cost so far. `print` it for a table."""

    rows: list[PlacementRow]
    outside_reads: dict[str, int] = field(default_factory=dict)
    """Tensors that were read outside their module's forward, and how often: each read is a fetch of its own."""
    outside_bytes: int = 0
    pool_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes on each device that offloaded groups pass through."""

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that do not live where they are used."""
        return sum(row.nbytes for row in self.rows if row.counters is not None)

    @property
    def resident_bytes(self) -> int:
        """Bytes that live where they are used."""
        return sum(row.nbytes for row in self.rows if row.counters is None)

    @property
    def bytes_moved(self) -> int:
        """Bytes that all forwards so far have moved."""
        return sum(row.counters.bytes_moved for row in self.rows if row.counters is not None)

    @property
    def stall_seconds(self) -> float:
        """Time that all forwards so far have waited for bytes."""
        return sum(row.counters.stall_seconds for row in self.rows if row.counters is not None)

    def __getitem__(self, name: str) -> PlacementRow:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    def __str__(self) -> str:
        header = ("module", "rests", "runs", "tensors", "bytes", "forwards", "hits", "misses", "moved", "stall s")
        lines = [header]
        # What is resident on one device is one line, however many modules it is.
        for (resident, rests, runs), rows in itertools.groupby(self.rows, key=lambda row: (row.counters is None, row.rests, row.runs)):
            if resident:
                members = list(rows)
                nbytes = sum(row.nbytes for row in members)
                lines.append((_span(members), rests, runs, str(sum(row.tensors for row in members)), bytes_text(nbytes), *[""] * 5))
                continue
            for row in rows:
                known = row.counters or Counters()
                moved = (
                    str(known.forwards),
                    str(known.hits),
                    str(known.misses),
                    bytes_text(known.bytes_moved),
                    f"{known.stall_seconds:.3f}",
                )
                lines.append((row.name or "(root)", rests, runs, str(row.tensors), bytes_text(row.nbytes), *moved))
        widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
        table = [
            "  ".join(
                cell.ljust(width) if column < 3 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        ]
        table.append(
            f"{bytes_text(self.resident_bytes)} resident, {bytes_text(self.offloaded_bytes)} offloaded, "
            f"{bytes_text(self.bytes_moved)} moved so far"
        )
        return "\n".join(line.rstrip() for line in table)


def _span(rows: Sequence[PlacementRow]) -> str:
    first, last = rows[0].name or "(root)", rows[-1].name
    return first if len(rows) == 1 else f"{first} … {last}"


def _groups(model: nn.Module) -> list[Group]:
    state = dispatched(model)
    if state is not None:
        return state.schedule.groups
    found: list[Group] = []
    for module in model.modules():
        for hook in hooks_of(module):
            if isinstance(hook, AlignDevicesHook):
                found += [group for group in hook.groups if group not in found]
    return found


def placement(model: nn.Module) -> Placement:
    """Where everything in the model is, dispatched or not: one row a group of offloaded weights, and one a module with resident tensors."""
    rows: list[PlacementRow] = []
    away: set[int] = set()
    groups = _groups(model)
    for group in groups:
        kinds = sorted({_rests(slot.resting) for slot in group.slots})
        nbytes = sum(slot.nbytes for slot in group.slots)
        name = group.name if len(group.slots) > 1 or not group.slots else group.slots[0].name.rpartition(".")[0]
        rows.append(PlacementRow(name, "+".join(kinds), str(group.pool.device), len(group.slots), nbytes, group.counters))
        away |= {id(slot.resting) for slot in group.slots}
        away |= {id(real) for real in group.present_tensors()}
    resident: dict[tuple[str, str], list[int]] = {}
    for tensor in registered_tensors(model):
        if id(tensor.tensor) not in away:
            key = (tensor.name.rpartition(".")[0], _rests(tensor.tensor))
            resident.setdefault(key, []).append(tensor.tensor.numel() * tensor.tensor.element_size())
    rows += [PlacementRow(name, device, device, len(sizes), sum(sizes)) for (name, device), sizes in resident.items()]
    order = {name: index for index, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
    rows.sort(key=lambda row: order.get(row.name.partition(" … ")[0], len(order)))
    state = dispatched(model)
    if state is None:
        return Placement(rows)
    tally = state.schedule.tally
    pools = {str(device): pool.nbytes for device, pool in state.schedule.pools.items()}
    return Placement(rows, dict(tally.reads), tally.bytes_read, pools)


def _rests(tensor: torch.Tensor) -> str:
    return tensor.origin.store.kind if isinstance(tensor, LazyTensor) else str(tensor.device)


def _find(model: nn.Module, name: str) -> torch.Tensor:
    try:
        module, attribute = owner_of(model, name)
    except AttributeError as error:
        raise DispatchError(f"The model has no parameter or buffer {name!r}: {error}.") from error
    tensor = module._parameters.get(attribute, module._buffers.get(attribute))
    if tensor is None:
        raise DispatchError(f"{name!r} is no parameter or buffer of the model.")
    return tensor


def get_parameter(model: nn.Module, name: str) -> torch.Tensor:
    """The values of one parameter or buffer: the tensor itself, detached, if it is resident, a copy on CPU if it is offloaded.

    Raises `DispatchError` for an unknown name.
    """
    return values_of(_find(model, name))


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor of the model or of its state dict: itself, detached, or a copy on CPU if it is offloaded."""
    return tensor.origin.fetch(torch.device("cpu")) if isinstance(tensor, LazyTensor) else tensor.detach()


def update_parameter(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Replaces the values of one parameter or buffer (and of all that are tied to it) where they rest; shape and dtype stay.

    Raises `DispatchError` for an unknown name or another shape.
    """
    tensor = _find(model, name)
    if tensor.shape != value.shape:
        raise DispatchError(f"{name} has shape {tuple(tensor.shape)}, the new value has {tuple(value.shape)}.")
    with torch.no_grad():
        tensor.copy_(value)


def get_parameter_device(parameter: nn.Module) -> torch.device:
    """The device of a module: that of its first parameter, or buffer, or tensor among its attributes. Of an offloaded one, where it runs.

    Raises `DispatchError` for a module without any tensor.
    """
    attributes = (value for module in parameter.modules() for value in vars(module).values() if isinstance(value, torch.Tensor))
    first = next(itertools.chain(parameter.parameters(), parameter.buffers(), attributes), None)
    if first is None:
        raise DispatchError(f"{type(parameter).__name__} holds no tensor, so it is on no device.")
    return first.origin.device if isinstance(first, LazyTensor) else first.device


def timeline(model: nn.Module) -> AbstractContextManager[Timeline]:
    """Records when weights travelled and when their blocks computed, within a `with` block: `with timeline(model) as recorded:`.

    `recorded.activities` is filled at the end of the block, which waits for all devices. Raises `DispatchError` for a model that is not
    dispatched, and for one that is being recorded already.
    """
    state = dispatched(model)
    return record(model, None if state is None else state.schedule)


@contextlib.contextmanager
def align_module_device(module: nn.Module, execution_device: Any = None) -> Iterator[None]:
    """Within the context the module's own tensors are real and on `execution_device` (by default where an offloaded module runs).

    Offloaded tensors are fetched, and what was changed in them in place is written to where they rest; resident ones are moved and back.
    Submodules are left alone.
    """
    device = None if execution_device is None else as_torch_device(execution_device)
    with contextlib.ExitStack() as stack:
        for table in (module._parameters, module._buffers):
            stack.enter_context(swap_in_values(table, device))  # type: ignore[arg-type]
        yield

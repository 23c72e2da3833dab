"""What modules keep beside parameters and buffers (torch's `get_extra_state`, `set_extra_state`): a tensor in files, or text in one.

Tensors are saved as they are. Plain values become JSON in a tensor of bytes, which the file's metadata name as such, so that nothing that
a file holds is ever run.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from ..errors import CheckpointError
from .host_memory import empty_host_tensor
from .transfer import Transfer

__all__ = ["JSON_TEXT", "ExtraState", "ExtraStates", "extra_state_takers", "is_extra_state", "set_extra_states", "text_tensor"]

NAME: Final = "_extra_state"
"""Last part of the name in a state dict, which torch gives it."""
JSON_TEXT: Final = "application/json"
"""What a file's metadata say of a tensor that holds JSON."""

DEEPEST: Final = 100
"""Lists and dicts within each other. What holds itself has no end."""
LONGEST_BITS: Final = 4096
"""Of an integer: Python writes and reads no more than 4300 digits."""


@dataclass(frozen=True, slots=True)
class ExtraState:
    """What fills the extra state of one module."""

    transfer: Transfer
    is_text: bool
    known: tuple[Any, ...] = ()
    """The value, where the checkpoint's header holds it and nothing has to be read."""

    def value(self, tensor: torch.Tensor) -> Any:
        """What the module is given, of the tensor that was read. Raises `CheckpointError` for text that is no JSON."""
        if self.known:
            return copy.deepcopy(self.known[0])
        if not self.is_text:
            return tensor
        try:
            return json.loads(tensor.view(torch.uint8).numpy().tobytes())
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.transfer.target!r}: damaged: should be JSON ({str(error)[:200]}).") from error


@dataclass(frozen=True, slots=True)
class ExtraStates:
    """Extra states on their way into a model."""

    states: Mapping[str, ExtraState]
    jobs: tuple[tuple[Transfer, torch.Tensor], ...]
    """What a reader fills before `values` is asked."""

    @classmethod
    def to_read(cls, states: Mapping[str, ExtraState]) -> ExtraStates:
        """With memory on CPU for each of them."""
        transfers = [state.transfer for state in states.values()]
        return cls(states, tuple((transfer, empty_host_tensor(transfer.shape, transfer.dtype)) for transfer in transfers))

    def values(self) -> dict[str, Any]:
        """What the modules are given, by name in the state dict. Raises `CheckpointError` for text that is no JSON."""
        return {transfer.target: self.states[transfer.target].value(tensor) for transfer, tensor in self.jobs}


def is_extra_state(name: str) -> bool:
    """Whether a name in a state dict is that of an extra state."""
    return name.rpartition(".")[2] == NAME


def extra_state_takers(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that take an extra state, by its name in the state dict."""
    return {
        f"{name}.{NAME}" if name else NAME: module
        for name, module in model.named_modules(remove_duplicate=False)
        if type(module).set_extra_state is not nn.Module.set_extra_state
    }


def text_tensor(value: Any) -> torch.Tensor | None:
    """A plain value as JSON in a tensor of bytes; None for what JSON would not give back as it was."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8) if _is_plain(value, DEEPEST) else None


def _is_plain(value: Any, depth: int) -> bool:
    if type(value) is list:
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value)
    if type(value) is dict:
        return depth > 0 and all(type(key) is str and _is_plain(item, depth - 1) for key, item in value.items())
    if type(value) is int:
        return value.bit_length() <= LONGEST_BITS
    return value is None or type(value) in (bool, float, str)


def set_extra_states(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Gives modules their extra states. Raises `CheckpointError` where one refuses; those that had taken theirs get back what they had."""
    takers = extra_state_takers(model)
    before: dict[str, Any] = {}
    for name, value in values.items():
        try:
            # A module may have none to give before it has got one.
            with contextlib.suppress(Exception):
                before[name] = copy.deepcopy(takers[name].get_extra_state())
            takers[name].set_extra_state(value)
        except BaseException as error:
            for earlier, state in before.items():
                with contextlib.suppress(Exception):
                    takers[earlier].set_extra_state(state)
            if not isinstance(error, Exception):
                raise
            raise CheckpointError(f"{name!r}: the {type(takers[name]).__name__} does not take it: {error!r}") from error

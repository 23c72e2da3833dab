"""A packed stack of expert matrices, of which single ones are unpacked when they are asked for."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import QuantizationError
from .packed_format import PackedFormat
from .packed_weight import PackedWeight

__all__ = ["PackedStack", "attach"]


class PackedStack(PackedWeight):
    """Stands where a module had a parameter (experts, …, …): `stack[expert]` is one matrix, unpacked, of `original_dtype`.

    It has no forward: its bytes come and go with the module around it, whose forward reads it. Its state dict has the names that
    `bitsandbytes.nn.parametrize` writes: that of the parameter for the packed bytes, and those of the companions below it.
    """

    def __init__(self, shape: tuple[int, ...], packing: PackedFormat, original_dtype: torch.dtype) -> None:
        super().__init__()
        self._shape = tuple(shape)
        self.packing = packing
        self.original_dtype = original_dtype
        self._fill_with_meta()

    @property
    def shape(self) -> tuple[int, ...]:
        """(experts, …, …), as of the parameter."""
        return self._shape

    def original_name(self, name: str) -> str:
        """The parameter was called as this module is."""
        return name

    def __len__(self) -> int:
        return self._shape[0]

    def __getitem__(self, index: Any) -> torch.Tensor:
        """The matrix of one expert (a number, or a tensor of one), or a stack of those of several (a tensor (n,)), each unpacked once.

        Raises `QuantizationError` for any other index, and IndexError for an expert that there is not.
        """
        if isinstance(index, torch.Tensor) and index.dim() == 1 and not index.is_floating_point() and index.dtype != torch.bool:
            distinct, places = index.unique(return_inverse=True)
            return torch.stack([self._matrix(each) for each in distinct.tolist()])[places]
        try:
            number = operator.index(index)
        except TypeError as error:
            raise QuantizationError(
                f"Packed experts are unpacked by number, one or a tensor (n,) of them; the index is {index!r}."
            ) from error
        return self._matrix(number)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if not name.startswith("_") and hasattr(torch.Tensor, name):
                raise AttributeError(
                    f"{name!r} asks for all expert matrices at once, and they are packed: they are unpacked one by one, by index. For "
                    "models of transformers: model.set_experts_implementation('eager')."
                ) from None
            raise

    def unpacked(self) -> torch.Tensor:
        """All matrices (experts, …, …), of `original_dtype`."""
        return torch.stack([self._matrix(number) for number in range(len(self))])

    def _matrix(self, number: int) -> torch.Tensor:
        count, rows, columns = self._shape
        if not -count <= number < count:
            raise IndexError(f"There is no expert {number}: there are {count}.")
        number %= count
        tensors = {name: tensor.detach() for name, tensor in self.packed_tensors().items()}
        return self.packing.unpack(tensors, (rows, columns), self.original_dtype, number)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Moves the packed tensors; a cast is about the matrices that are unpacked from now on."""
        super()._apply(fn, recurse)
        self.original_dtype = fn(torch.empty(0, dtype=self.original_dtype)).dtype
        return self

    def _saved_weight(self, prefix: str) -> str:
        return prefix.removesuffix(".")


def attach(owner: nn.Module, key: str, stack: PackedStack) -> Callable[[], None]:
    """Puts the stack in the place of the parameter `key` of `owner`. Returns what undoes it."""
    parameter = owner._parameters.pop(key)
    owner._modules[key] = stack
    hook = owner.register_load_state_dict_pre_hook(_hand_down)

    def undo() -> None:
        hook.remove()
        del owner._modules[key]
        owner._parameters[key] = parameter

    return undo


def _hand_down(owner: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """In a state dict the packed bytes have the name of the parameter, which is that of the module now, and scales may stand beside
    it: torch hands a module what is named below it, so they are named so.
    """
    for key, child in owner._modules.items():
        if not isinstance(child, PackedStack):
            continue
        below = f"{prefix}{key}."
        for attribute in child.specs():
            saved = child.packing.saved_name(attribute, prefix + key, below)
            if saved is not None and saved in state_dict and not saved.startswith(below):
                state_dict[below + attribute] = state_dict.pop(saved)

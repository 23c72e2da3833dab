"""A packed weight as a module: its bytes and all their companions are frozen parameters, so that what moves tensors moves them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from ..errors import QuantizationError
from ..protocols import UNTRAINABLE, TensorSpec
from .packed_format import PackedFormat

__all__ = ["PackedParameter", "PackedWeight"]


class PackedParameter(nn.Parameter):
    """A packed tensor, as a parameter that refuses to be trained, by name."""

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Raises `QuantizationError` for True."""
        if requires_grad:
            raise self.__dict__.get(UNTRAINABLE, _untrainable)()
        return super().requires_grad_(False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = super().__deepcopy__(memo)
        made.__dict__.update(self.__dict__)
        return made


_NOT_TRAINED: Final = "Packed weights cannot be trained. Attach adapters (LoRA) to the layers, and train these."


def _untrainable(layer: str = "") -> QuantizationError:
    """`layer`: full name of the module that holds the tensor, in the model that it was packed for."""
    return QuantizationError(f"{layer or 'A weight of the model'} is packed. {_NOT_TRAINED}")


class PackedWeight(nn.Module):
    """What packed layers and packed stacks of matrices share."""

    packing: PackedFormat
    original_dtype: torch.dtype
    """What the weight was packed from, and is unpacked to."""
    full_name: str = ""
    """In the model that it was packed for."""
    nested_offset_value: float | None = None
    """With double quantization: the value of `nested_offset`, which state dicts keep as a number."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight, were it not packed."""
        raise NotImplementedError

    def original_name(self, name: str) -> str:
        """Full name of the weight before it was packed, where this module is called `name`."""
        raise NotImplementedError

    def unpacked(self) -> torch.Tensor:
        """The weight, of `shape` and `original_dtype`, that the packed bytes stand for."""
        raise NotImplementedError

    def specs(self) -> dict[str, TensorSpec]:
        """Of the packed weight and its companions, by attribute."""
        return self.packing.tensors(self.shape)

    def packed_tensors(self) -> dict[str, torch.Tensor]:
        """The packed weight and its companions, by attribute."""
        return {name: self._parameters[name] for name in self.specs()}  # type: ignore[misc]

    def fill(self, tensors: Mapping[str, torch.Tensor], nested_offset: float | None = None) -> None:
        """Takes the packed weight and its companions, by attribute, as they are. `nested_offset`: that one's value, if it is on meta."""
        # The companions come first: where a whole model is asked to require gradients, they answer, and not bitsandbytes' parameter.
        self._parameters.pop("weight", None)
        for name in sorted(self.specs(), key=lambda name: name == "weight"):
            self._parameters[name] = self._parameter(name, tensors[name].detach())
        offset = tensors.get("nested_offset")
        if nested_offset is None and offset is not None and offset.device.type != "meta":
            nested_offset = offset.item()
        self.nested_offset_value = nested_offset

    def _parameter(self, name: str, tensor: torch.Tensor) -> nn.Parameter:
        return PackedParameter(tensor, requires_grad=False)

    def note_name(self, name: str) -> None:
        """Tells the packed tensors what this module is called in the model, for errors."""
        self.full_name = name
        for tensor in self.packed_tensors().values():
            tensor.__dict__[UNTRAINABLE] = partial(_untrainable, name)

    def _fill_with_meta(self) -> None:
        self.fill({name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in self.specs().items()})

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Moves packed tensors and never casts them: `half()` is about what is not packed."""
        packed = {id(tensor) for tensor in self.packed_tensors().values()}

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            result = fn(tensor)
            return result if id(tensor) not in packed or result.dtype == tensor.dtype else tensor.to(result.device)

        super()._apply(moved, recurse)
        weight = self._parameters["weight"]
        if weight is not None and weight.device.type != "meta":
            self._parameters["weight"] = self._parameter("weight", weight.data)
        if self.full_name:
            self.note_name(self.full_name)
        return self

    def _saved_weight(self, prefix: str) -> str:
        """Full name of the packed bytes in a state dict."""
        return f"{prefix}weight"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)
        weight = self._saved_weight(prefix)
        for name, tensor in [(name, destination.pop(prefix + name)) for name in self.specs() if prefix + name in destination]:
            saved = self.packing.saved_name(name, weight, prefix)
            if saved is not None:
                destination[saved] = tensor
        destination |= self.packing.described(weight, prefix, self.shape, self.original_dtype, self.nested_offset_value)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        weight = self._saved_weight(prefix)
        for name in self.specs():
            saved = self.packing.saved_name(name, weight, prefix)
            if saved is not None and saved != prefix + name and saved in state_dict:
                state_dict[prefix + name] = state_dict.pop(saved)
        found = self.packing.take_description(state_dict, weight, self.shape)
        if found is not None:
            dtype, offset = found
            self._note_loaded(dtype)
            if offset is not None:
                self.nested_offset_value = offset
                state_dict[f"{prefix}nested_offset"] = torch.full(self.specs()["nested_offset"].shape, offset)
        nn.Module._load_from_state_dict(self, state_dict, prefix, *arguments)

    def _note_loaded(self, dtype: torch.dtype) -> None:
        """What a state dict that is loaded was packed from; a module keeps the dtype that it unpacks to."""

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """The bias may be trained, packed weights may not: raises `QuantizationError` then."""
        if requires_grad:
            raise QuantizationError(_NOT_TRAINED if not self.full_name else f"{self.full_name}: {_NOT_TRAINED}")
        return super().requires_grad_(False)

    def train(self, mode: bool = True) -> Any:
        """Raises `QuantizationError` where something has asked for gradients of packed tensors: they cannot be trained."""
        if mode and any(tensor.requires_grad for tensor in self.packed_tensors().values()):
            self.requires_grad_(True)
        return super().train(mode)

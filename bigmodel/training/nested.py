"""Nested structures of tensors within one process: applying a function to their tensors, their sizes, slices, joins and precisions.

A structure is made of lists, tuples, namedtuples, deques, mappings and dataclasses. What is neither one of these nor a tensor (None,
numbers, strings, other objects) is left as it is, except where a function says otherwise.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from ..errors import StructureError
from ..structures import children, is_namedtuple, rebuilt

__all__ = [
    "ConvertOutputsToFp32",
    "TensorInformation",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "find_batch_size",
    "get_data_structure",
    "get_shape",
    "honor_type",
    "ignorant_find_batch_size",
    "initialize_tensors",
    "is_tensor_information",
    "is_torch_tensor",
    "listify",
    "pad_input_tensors",
    "recursively_apply",
    "slice_tensors",
]


@dataclass(frozen=True)
class TensorInformation:
    """What a tensor is, without its data."""

    shape: torch.Size
    dtype: torch.dtype


def is_torch_tensor(tensor: Any) -> TypeGuard[torch.Tensor]:
    """Whether `tensor` is one."""
    return isinstance(tensor, torch.Tensor)


def is_tensor_information(tensor_info: Any) -> TypeGuard[TensorInformation]:
    """Whether `tensor_info` is a `TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """The items of `generator` in a container of the type of `obj`: a list, a tuple, or a namedtuple, whose fields they are."""
    return type(obj)(*generator) if is_namedtuple(obj) else type(obj)(generator)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """`data` with `func(leaf, *args, **kwargs)` in the place of every leaf that passes `test_type`; containers keep their types.

    Args:
        func: applied to the leaves.
        data: a leaf, or a structure of leaves.
        test_type: says which leaves; all tensors, if not given.
        error_on_other_type: other leaves are an error; else they are left as they are.

    Raises:
        StructureError: a `TypeError`, for another leaf under `error_on_other_type`.
    """
    if not isinstance(data, (tuple, list, Mapping)) and test_type(data):
        return func(data, *args, **kwargs)
    inside = children(data)
    if inside is not None:
        return rebuilt(
            data,
            [
                recursively_apply(func, value, *args, test_type=test_type, error_on_other_type=error_on_other_type, **kwargs)
                for value in inside
            ],
        )
    if error_on_other_type:
        raise StructureError(
            f"Unsupported types ({type(data)}) passed to `{_name(func)}`. Only nested list/tuple/dicts of objects that are valid for "
            f"`{_name(test_type)}` should be passed."
        )
    return data


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", repr(function))


def get_data_structure(data: Any) -> Any:
    """`data` with a `TensorInformation` in the place of each tensor."""
    return recursively_apply(lambda tensor: TensorInformation(shape=tensor.shape, dtype=tensor.dtype), data)


def get_shape(data: Any) -> Any:
    """`data` with its shape, a list, in the place of each tensor."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Uninitialized tensors on the CPU for what `get_data_structure` has described."""
    return recursively_apply(lambda info: torch.empty(info.shape, dtype=info.dtype), data_structure, test_type=is_tensor_information)


def find_batch_size(data: Any) -> int:
    """The size of dimension 0 of the first leaf; None is passed over.

    Raises:
        StructureError: an empty structure (a `ValueError`), a first leaf that is no tensor (a `TypeError`) or has no dimension.
    """
    leaf = _first_leaf(data)
    if not isinstance(leaf, torch.Tensor):
        raise StructureError(f"Can only find the batch size of tensors but got {type(leaf)}.")
    if leaf.ndim == 0:
        raise StructureError("Cannot find the batch size of a tensor without dimensions.")
    return leaf.shape[0]


def _first_leaf(data: Any) -> Any:
    inside = children(data)
    if inside is None:
        return data
    if not len(inside):
        raise StructureError(f"Cannot find the batch size from empty {type(data)}.")
    return _first_leaf(next((value for value in inside if value is not None), None))


def ignorant_find_batch_size(data: Any) -> int | None:
    """`find_batch_size`, or None where it cannot be found."""
    try:
        return find_batch_size(data)
    except StructureError:
        return None


def listify(data: Any) -> Any:
    """`data` with lists of numbers (a number, for a tensor without dimensions) in the place of tensors."""
    return recursively_apply(_numbers, data)


def _numbers(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().cpu()
    if tensor.is_floating_point() and tensor.dtype.itemsize <= 2:  # torch lists float8 only as something wider
        tensor = tensor.float()
    return tensor.tolist()


def slice_tensors(data: Any, tensor_slice: Any, process_index: int | None = None, num_processes: int | None = None) -> Any:
    """`data` with `tensor[tensor_slice]` in the place of each tensor; the other two arguments change nothing."""
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Structures of one make as one structure, their tensors joined along `dim`. A single one is returned as it is.

    Raises:
        StructureError: a `TypeError`, for leaves that are no tensors; containers of different kinds, lengths or keys.
    """
    if not len(data):
        raise StructureError("There is nothing to concatenate: the list is empty.")
    first = data[0]
    if len(data) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat(list(data), dim=dim)
    inside = children(first)
    if inside is None:
        raise StructureError(f"Can only concatenate tensors but got {type(first)}.")
    if isinstance(first, Mapping):
        for other in data:
            if not isinstance(other, Mapping) or other.keys() != first.keys():
                raise StructureError(f"Cannot concatenate {_keys(first)} and {_keys(other)}.")
        return rebuilt(first, [concatenate([other[key] for other in data], dim) for key in first])
    others = [children(other) for other in data]
    if any(type(other) is not type(first) for other in data) or any(other is None or len(other) != len(inside) for other in others):
        makes = ", ".join(f"{type(other).__name__} of {len(held or ())}" for other, held in zip(data, others, strict=True))
        raise StructureError(f"Cannot concatenate containers of different makes: {makes}.")
    return rebuilt(first, [concatenate(column, dim) for column in zip(*(other for other in others if other is not None), strict=True)])


def _keys(data: Any) -> str:
    return f"{type(data).__name__} with keys {list(data)}" if isinstance(data, Mapping) else str(type(data))


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """The last row repeated until `num_processes` divides the batch; nothing is added where it does already.

    Args:
        tensor: a structure. Tensors of `batch_size` rows along `dim` are padded, other ones (a mask that is broadcast) are not.
        batch_size: rows along `dim`.
        num_processes: what the padded batch is to be a multiple of.
        dim: the dimension of the rows.
    """
    missing = -batch_size % num_processes

    def pad(tensor: torch.Tensor) -> torch.Tensor:
        if not -tensor.ndim <= dim < tensor.ndim or tensor.shape[dim] != batch_size:
            return tensor
        last = tensor.narrow(dim, batch_size - 1, 1)
        return torch.cat([tensor, *[last] * missing], dim=dim)

    return recursively_apply(pad, tensor) if missing and batch_size else tensor


def convert_to_fp32(tensor: Any) -> Any:
    """The structure with float16 and bfloat16 tensors as float32; what has another dtype is not touched."""
    return recursively_apply(torch.Tensor.float, tensor, test_type=_is_half)


def _is_half(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.float16, torch.bfloat16)


class ConvertOutputsToFp32:
    """A forward whose float16 and bfloat16 outputs are float32. It cannot be pickled: what is saved is the model without it."""

    def __init__(self, model_forward: Callable[..., Any]):
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> Any:
        raise pickle.PicklingError(
            "A model prepared for mixed precision cannot be pickled: take the wrapper off first, with `Accelerator.unwrap_model(model)`."
        )


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """A function that gives the outputs of `model_forward` with float16 and bfloat16 as float32; `__wrapped__` leads back to it."""
    converting = ConvertOutputsToFp32(model_forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return converting(*args, **kwargs)

    forward.__wrapped__ = converting  # type: ignore[attr-defined]
    return forward

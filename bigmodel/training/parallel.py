"""Models out of their wrappers, module trees from the bottom up, and files that one process writes for all."""

from __future__ import annotations

import codecs
import io
import logging
import operator
import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import torch
from torch import nn

from ..atomic import atomic_file
from ..dispatch import LazyTensor, values_of
from ..errors import TrainingError
from ..loading import without_aliases, write_safetensors
from ..loading.sharded import is_sharded
from ..protocols import TensorSpec
from ..text import kind_text
from .available import is_peft_available
from .compiling import is_compiled_module
from .state import PartialState

__all__ = [
    "clean_state_dict_for_safetensors",
    "extract_model_from_parallel",
    "get_module_children_bottom_up",
    "is_peft_model",
    "load",
    "merge_dicts",
    "model_has_dtensor",
    "recursive_getattr",
    "save",
]

M = TypeVar("M", bound=MutableMapping[str, Any])

logger = logging.getLogger(__name__)

WRAPPERS = (
    ("torch.nn.parallel", "DistributedDataParallel"),
    ("torch.nn.parallel", "DataParallel"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("torch_xla.distributed.fsdp", "XlaFullyShardedDataParallel"),
    ("deepspeed", "DeepSpeedEngine"),
)
"""Classes that hold the model that they spread as `module`, by where they come from."""


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """The model within `DistributedDataParallel`, `DataParallel`, FSDP, DeepSpeed and `torch.compile`, in whatever order they are nested.

    Args:
        keep_fp32_wrapper: False also gives the model its own `forward` back, in place: the one that stands as `_original_forward`.
        keep_torch_compile: the extracted model is compiled as it was; False gives what was compiled. The wrapped model stays as it is,
            and parts that were compiled by themselves stay compiled.
        recursive: wrappers below the model are taken away too, in place.
    """
    compiled = None
    inner = model
    while True:
        if is_compiled_module(inner):
            compiled = compiled or inner
            inner = inner._orig_mod  # type: ignore[assignment]
        elif _is_wrapper(inner):
            inner = inner.module  # type: ignore[assignment]
        else:
            break
    if not keep_torch_compile:
        inner = inner.__dict__.get("_orig_mod", inner)  # what `compile_regions` made a copy of
    if recursive:
        for part in inner.modules():
            for name, child in part._modules.items():
                if child is not None:
                    part._modules[name] = extract_model_from_parallel(child, keep_torch_compile=keep_torch_compile)
    if not keep_fp32_wrapper:
        _restore_forward(inner)
    if compiled is None or not keep_torch_compile:
        return inner
    if compiled._orig_mod is inner:
        return compiled
    # Not `compiled` with another model in it: whoever trains with it needs the wrapper in there.
    return type(compiled)(inner, compiled.dynamo_ctx)


def _is_wrapper(module: nn.Module) -> bool:
    # A library that nobody has imported wraps nothing.
    loaded = [getattr(sys.modules[origin], name, None) for origin, name in WRAPPERS if origin in sys.modules]
    return isinstance(module, tuple(each for each in loaded if each is not None))


def _restore_forward(model: nn.Module) -> None:
    original = model.__dict__.pop("_original_forward", None)
    if original is None:
        return
    if getattr(original, "__self__", None) is model and original.__func__ is type(model).forward:
        model.__dict__.pop("forward", None)  # the class's own again, so that the model can be pickled
    else:
        model.forward = original


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[nn.Module] | list[tuple[str, nn.Module]]:
    """Every module of the model after those that it holds, `model` last; a module with several names comes once, under the first.

    With `return_fqns`, pairs of full name (`""` for the model) and module.
    """
    pairs = list(_bottom_up("", model, set()))
    return pairs if return_fqns else [module for _, module in pairs]


def _bottom_up(name: str, module: nn.Module, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    seen.add(module)
    for key, child in module.named_children():
        if child not in seen:
            yield from _bottom_up(f"{name}.{key}" if name else key, child, seen)
    yield name, module


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict without further names for the same bytes, each tensor's numbers in a row; what is no tensor stays.

    One warning tells the names that are left out, and those under which their bytes are.
    """
    tensors = {name: value for name, value in state_dict.items() if isinstance(value, torch.Tensor)}
    _, aliases = without_aliases(tensors)
    if aliases:
        logger.warning("Removed shared tensor %s: each has the bytes of another name, which stays: %s.", set(aliases), aliases)
    return {
        name: value.contiguous() if isinstance(value, torch.Tensor) else value for name, value in state_dict.items() if name not in aliases
    }


def is_peft_model(model: nn.Module) -> bool:
    """Whether the model, within its wrappers, is one of PEFT's, with adapters."""
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(extract_model_from_parallel(model), PeftModel)


def model_has_dtensor(model: nn.Module) -> bool:
    """Whether this process holds a part of any of the model's parameters (DTensors: FSDP2, tensor parallelism)."""
    return any(is_sharded(parameter) for parameter in model.parameters())


def save(obj: Any, f: str | os.PathLike[str] | BinaryIO, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Saves `obj` from the main process; on the others it does nothing. A file of that name is replaced when the new one is complete.

    Args:
        obj: what `torch.save` saves; with `safe_serialization`, a dict of names to tensors.
        f: a path, or a stream.
        save_on_each_node: the first process of every host saves.
        safe_serialization: writes safetensors. Of names for the same bytes one is written; the others are noted in the file's metadata as
            `bigmodel.save_model` does, and told in one warning.

    Raises:
        TrainingError: with `safe_serialization`, for what is no dict of whole tensors with values.
        CheckpointError: for a dtype that safetensors lacks.
    """
    state = PartialState()
    if not (state.is_local_main_process if save_on_each_node else state.is_main_process):
        return
    write = _write_tensors if safe_serialization else torch.save
    if not isinstance(f, (str, os.PathLike)):
        write(obj, f)
        return
    with atomic_file(Path(f)) as unbuffered:
        # torch takes a write for done, of which an unbuffered stream may do a part.
        stream = io.BufferedWriter(unbuffered)
        write(obj, stream)
        stream.flush()
        stream.detach()


def _write_tensors(tensors: Mapping[str, torch.Tensor], stream: BinaryIO) -> None:
    if not isinstance(tensors, Mapping):
        raise TrainingError(f"safe_serialization=True saves a dict of names to tensors, not {kind_text(tensors)}.")
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TrainingError(f"{name!r} is {kind_text(tensor)}, not a tensor: use safe_serialization=False.")
        if is_sharded(tensor):
            raise TrainingError(f"{name!r} is sharded: all processes gather it first (`full_tensor()`), then this one can save it.")
        if tensor.device.type == "meta" and not isinstance(tensor, LazyTensor):
            raise TrainingError(f"{name!r} is on the meta device and has no values to save: load the model first.")
    kept, aliases = without_aliases(tensors)
    if aliases:
        logger.warning(
            "Removed shared tensor %s while saving: each has the bytes of another name, which is saved and noted in the file: %s.",
            set(aliases),
            aliases,
        )
    specs = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in kept.items()}
    write_safetensors(stream, specs, lambda name: values_of(kept[name]), aliases)


def load(f: str | os.PathLike[str] | BinaryIO, map_location: Any = None, **kwargs: Any) -> Any:
    """What `torch.save` has written, with tensors, plain values and arrays of numpy in it; anything else only with `weights_only=False`.

    Args:
        f: a path, or a stream.
        map_location: where tensors go, as in `torch.load`.
        kwargs: other arguments of `torch.load`.
    """
    with torch.serialization.safe_globals(_numpy_globals()):
        return torch.load(f, map_location=map_location, **{"weights_only": True, **kwargs})


def _numpy_globals() -> list[Any]:
    """What pickles of numpy's arrays and numbers call, under the names of numpy 1 and 2; without the dtype of arrays of any objects."""
    # The module of these functions is not public, and has another name in each.
    makers: list[Any] = [np.empty(0).__reduce__()[0], np.float64(0).__reduce__()[0]]
    named = [(maker, f"numpy.{core}.multiarray.{maker.__name__}") for maker in makers for core in ("core", "_core")]
    dtypes = [each for each in vars(np.dtypes).values() if isinstance(each, type) and each is not np.dtypes.ObjectDType]
    return [np.ndarray, np.dtype, codecs.encode, *named, *dtypes]


def merge_dicts(source: Mapping[str, Any], destination: M) -> M:
    """Puts the values of `source` into `destination`, dicts into the dicts that are there; returns `destination`."""
    for key, value in source.items():
        if isinstance(value, Mapping):
            there = destination.get(key)
            destination[key] = merge_dicts(value, there if isinstance(there, MutableMapping) else {})
        else:
            destination[key] = value
    return destination


def recursive_getattr(obj: Any, attr: str) -> Any:
    """`obj.a.b` for `attr="a.b"`. Raises AttributeError."""
    return operator.attrgetter(attr)(obj)

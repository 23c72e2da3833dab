"""`save_pretrained` of a model with offloaded weights: tensor by tensor from where they rest, under the names they were loaded from."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...dispatch import LazyTensor, values_of
from ...errors import QuantizationError
from ...loading import save_model
from ...planning import convert_file_size_to_int
from ...quantization import has_packed_stacks, unknown_to_transformers
from .package import transformers_module
from .unconvert import Unconverted

__all__ = ["save_pretrained"]

logger = logging.getLogger(__name__)

_DEFAULT_SHARD_SIZE = "50GB"
"""As in transformers."""


def save_pretrained(
    model: Any, save_directory: str | os.PathLike[str], is_main_process: bool = True, state_dict: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """In the place of `transformers.PreTrainedModel.save_pretrained`. All files appear together when they are complete.

    transformers' own holds a whole shard in memory (50 GB by default), and cannot undo a conversion whose tensors lie in two shards. This
    one holds what one conversion needs. Raises `QuantizationError` where `save_original_format=True` is asked for, and weights are packed
    in a way that only bigmodel loads.
    """
    unknown = unknown_to_transformers(model)
    if unknown and kwargs.get("save_original_format"):
        raise QuantizationError(
            f"save_original_format=True asks for files that transformers loads, and it cannot load {unknown}. Leave it out for files "
            "that bigmodel.from_pretrained loads, or load the model without packing these (skip_modules) and save it then."
        )
    if unknown:
        logger.warning("What is saved to %s is for bigmodel.from_pretrained: transformers cannot load %s.", save_directory, unknown)
    if has_packed_stacks(model):  # of which a conversion could make nothing
        kwargs["save_original_format"] = False
    offloaded = any(isinstance(tensor, LazyTensor) for tensor in (*model.parameters(), *model.buffers()))
    # A map that names the CPU or the disk makes transformers convert shard by shard, which is for offloaded weights alone.
    with contextlib.nullcontext() if offloaded else _without_map(model):
        simple = is_main_process and state_dict is None and not args and set(kwargs) <= {"max_shard_size", "save_original_format"}
        if not (offloaded and simple) or getattr(model, "_hf_peft_config_loaded", False) or getattr(model, "hf_quantizer", None):
            if state_dict is None:
                state_dict = _stand_ins(model)
            return _own(model)(model, save_directory, is_main_process, state_dict, *args, **kwargs)
        return _save(model, Path(save_directory), **kwargs)


def _own(model: Any) -> Any:
    """transformers' own method."""
    return super(type(model), model).save_pretrained.__func__


def _save(model: Any, folder: Path, max_shard_size: int | str = _DEFAULT_SHARD_SIZE, save_original_format: bool = True) -> None:
    state = _stand_ins(model)
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    # Packed layers save more than they have registered under these names; transformers would look for it in the modules.
    registered = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))}
    others = {name: state.pop(name) for name in list(state) if name not in registered}
    state = transformers_module("modeling_utils").remove_tied_weights_from_state_dict(state, model) | others
    tensors = model.state_dict()
    saved = Unconverted(model, state, lambda name: values_of(tensors[name]), convert=save_original_format)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as beside:
        # The configuration, the generation configuration and code that came with the model; no weights.
        with _without_map(model):
            _own(model)(model, beside, state_dict={})
        save_model(_Names(saved.tensors), folder, convert_file_size_to_int(max_shard_size), fetch=saved.fetch)
        for file in Path(beside).iterdir():
            if not file.name.startswith("model"):
                os.replace(file, folder / file.name)


class _Names(nn.Module):
    """Stands for a model of which only names, shapes and dtypes are asked."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return dict(self._tensors)


def _stand_ins(model: Any) -> dict[str, Any]:
    """The state dict with tensors on meta for what is offloaded.

    To find ties transformers asks for addresses, for which a placeholder would fetch its values. A tensor on meta has none: it is compared
    by the parameter that it stands for, and fetched through the hook of its module when it is written.
    """
    return {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") if isinstance(tensor, LazyTensor) else tensor
        for name, tensor in model.state_dict().items()
    }


@contextlib.contextmanager
def _without_map(model: Any) -> Iterator[None]:
    device_map = model.__dict__.pop("hf_device_map", None)
    try:
        yield
    finally:
        if device_map is not None:
            model.hf_device_map = device_map

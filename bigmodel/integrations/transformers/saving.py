"""`save_pretrained` of a model with offloaded weights: transformers' own, which fetches them shard by shard."""

from __future__ import annotations

import contextlib
import copy
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...dispatch import LazyTensor

__all__ = ["SavePretrained"]


class SavePretrained:
    """The method `save_pretrained` of one model, which tells transformers what is offloaded and what is not.

    Does not keep the model alive; belongs to the copy in a deep copy.
    """

    def __init__(self, model: Any) -> None:
        self._model: Callable[[], Any] = weakref.ref(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> SavePretrained:
        return SavePretrained(copy.deepcopy(self._model(), memo))

    def __call__(
        self, save_directory: str | os.PathLike[str], is_main_process: bool = True, state_dict: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """See `transformers.PreTrainedModel.save_pretrained`, which this calls."""
        model = self._model()
        offloaded = any(isinstance(tensor, LazyTensor) for tensor in (*model.parameters(), *model.buffers()))
        if state_dict is None:
            state_dict = {name: _stand_in(tensor) for name, tensor in model.state_dict().items()}
        # A map that names the CPU or the disk makes transformers convert shard by shard, which is for offloaded weights alone.
        with contextlib.nullcontext() if offloaded else _without_map(model):
            return type(model).save_pretrained(model, save_directory, is_main_process, state_dict, *args, **kwargs)


def _stand_in(tensor: Any) -> Any:
    """To find ties transformers asks for addresses, for which a placeholder would fetch its values. A tensor on meta has none: it is
    compared by the parameter that it stands for, and fetched through the hook of its module when it is written."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") if isinstance(tensor, LazyTensor) else tensor


@contextlib.contextmanager
def _without_map(model: Any) -> Iterator[None]:
    device_map = model.__dict__.pop("hf_device_map", None)
    try:
        yield
    finally:
        if device_map is not None:
            model.hf_device_map = device_map

"""The tensors of a checkpoint made from a model's: transformers' conversions, undone group by group."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...errors import CheckpointError
from .package import transformers_module

__all__ = ["Unconverted"]

_GROUPS_KEPT = 2
"""Conversions whose results are held: the two of a layer's experts, whose tensors alternate in a file."""


class Unconverted:
    """The state dict that a model is saved as.

    Which tensors of the model each saved tensor is made from is found by undoing all conversions on tensors without data; the values of
    one group are computed when one of its tensors is fetched.

    Args:
        state: the model's state dict; only names, shapes and dtypes count.
        fetch: gives the values of a tensor of the model.
        convert: whether to undo the conversions; otherwise names and values are the model's own.

    Raises:
        CheckpointError: a conversion cannot be undone for its tensors alone.
    """

    def __init__(
        self, model: Any, state: Mapping[str, torch.Tensor], fetch: Callable[[str], torch.Tensor], *, convert: bool = True
    ) -> None:
        self._model = model
        self._fetch_own = fetch
        self._results: OrderedDict[frozenset[str], dict[str, torch.Tensor]] = OrderedDict()
        stand_ins = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in state.items()}
        self.tensors: dict[str, torch.Tensor] = stand_ins
        """Names, shapes and dtypes of what is saved, on meta."""
        self._same: dict[str, str] = {name: name for name in stand_ins}
        self._made_from: dict[str, frozenset[str]] = {}
        if convert:
            self._trace(stand_ins)

    def _trace(self, stand_ins: dict[str, torch.Tensor]) -> None:
        own = {id(tensor): name for name, tensor in stand_ins.items()}
        with _Ancestry(stand_ins) as ancestry:
            saved = self._reverted(dict(stand_ins))
        self.tensors = {name: tensor.detach().clone() for name, tensor in saved.items()}
        self._same = {name: own[id(tensor)] for name, tensor in saved.items() if id(tensor) in own}
        self._made_from = {name: ancestry.of(tensor) for name, tensor in saved.items() if name not in self._same}
        for names in dict.fromkeys(self._made_from.values()):
            alone = self._reverted({name: stand_ins[name] for name in sorted(names)})
            lost = [name for name, group in self._made_from.items() if group == names and name not in alone]
            if lost or not names:
                raise CheckpointError(
                    f"transformers cannot undo the conversion of {sorted(names)} for these tensors alone ({lost} would be missing). "
                    "Save with save_original_format=False."
                )

    def fetch(self, name: str) -> torch.Tensor:
        """The values of one saved tensor."""
        same = self._same.get(name)
        if same is not None:
            return self._fetch_own(same)
        names = self._made_from[name]
        results = self._results.get(names)
        if results is None:
            while len(self._results) >= _GROUPS_KEPT:
                self._results.popitem(last=False)
            results = self._results[names] = self._reverted({each: self._fetch_own(each).to("cpu") for each in sorted(names)})
        self._results.move_to_end(names)
        return results[name]

    def _reverted(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        reverted: dict[str, torch.Tensor] = transformers_module("core_model_loading").revert_weight_conversion(self._model, state)
        return reverted


class _Ancestry(TorchDispatchMode):
    """Remembers, for every tensor that is computed inside, which of the given ones it is made from."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        # The tensors are kept beside their ids, so that no id is given twice.
        self._names = {id(tensor): (tensor, frozenset([name])) for name, tensor in tensors.items()}

    def of(self, tensor: torch.Tensor) -> frozenset[str]:
        """Names of the tensors that this one is made from."""
        return self._names.get(id(tensor), (tensor, frozenset()))[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        names = frozenset().union(*(self.of(tensor) for tensor in inputs))
        for tensor in [*tree_leaves(result), *(inputs if func._schema.is_mutable else [])]:
            if isinstance(tensor, torch.Tensor):
                self._names[id(tensor)] = (tensor, names | self.of(tensor))
        return result

"""What many requests about one model have in common: walks over its tree and dry runs of its modules, each done once."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Final

import torch

from .items import Inventory, find_items
from .needs import Needs, Workload, compute_dtype, needs_of
from .request import Request
from .sizes import DtypeLike, TensorBytes, tensor_bytes_rule
from .stages import ModelFacts, facts_of

__all__ = ["SharedWork"]

LITTLE_PACKED: Final = 0.5
"""Share of the weights below which a plan says how many are packed."""


class SharedWork:
    """Inventories and needs of one model, kept for requests that differ in other things."""

    def __init__(self) -> None:
        self._inventories: dict[tuple[DtypeLike | None, str], Inventory] = {}
        self._tensors: dict[int, tuple[str, torch.Tensor]] = {}
        """Every distinct tensor with its first name, once the model has been walked over."""
        self._largest_packed: dict[str, int] = {}
        """The most elements that are unpacked at once for a product, by name of the packed format."""
        self._packed_shares: dict[str, float] = {}
        """Of all elements, by name of the format."""
        self._needs: dict[tuple[DtypeLike | None, Workload, bool], Needs] = {}
        self._facts: ModelFacts | None = None

    def inventory(self, request: Request) -> Inventory:
        """All tensors of the model in the planned dtypes. Raises `PlanError` for a model without tensors."""
        format_ = request.weight_format
        key = (request.dtype, "" if format_ is None else format_.name)
        if key not in self._inventories:
            packed_sizes = {} if format_ is None else format_.packed_sizes(request.model)
            rule = tensor_bytes_rule(request.dtype, request.special_dtypes, packed_sizes)
            known = next(iter(self._inventories.values()), None)
            self._inventories[key] = self._walked(request, rule) if known is None else self._resized(known, rule)
            if format_ is not None:
                self._packed_shares[format_.name] = self._share(packed_sizes)
                tables = self._inventories[key].row_tables  # of which a lookup unpacks its rows alone
                packed = (tensor for name, tensor in self._tensors.values() if name in packed_sizes and id(tensor) not in tables)
                self._largest_packed[format_.name] = max(map(_unpacked_elements, packed), default=0)
        return self._inventories[key]

    def packing_notes(self, request: Request) -> list[str]:
        """What to say where the packed format of the request packs little of the model."""
        if request.weight_format is None:
            return []
        name = request.weight_format.name
        share = self._packed_shares[name]
        if share >= LITTLE_PACKED:
            return []
        return [
            f"{name} packs {share:.1%} of the weights: it is for linear layers and stacked experts; the rest (embeddings) stays as it is."
        ]

    def _share(self, packed: Collection[str]) -> float:
        """How much of all elements the tensors of these names are."""
        elements = [(name in packed, tensor.numel()) for name, tensor in self._tensors.values()]
        return sum([size for is_packed, size in elements if is_packed]) / max(1, sum([size for _, size in elements]))

    def _walked(self, request: Request, rule: TensorBytes) -> Inventory:
        def recording(name: str, tensor: torch.Tensor) -> int:
            self._tensors[id(tensor)] = name, tensor
            return rule(name, tensor)

        return find_items(request.model, recording, request.no_split_module_classes)

    def _resized(self, known: Inventory, rule: TensorBytes) -> Inventory:
        return replace(known, nbytes={key: rule(*self._tensors[key]) for key in known.nbytes})

    def needs(self, request: Request) -> Needs:
        """What the run needs beside weights. A packed weight is unpacked for its product: there is room for the largest of them, or two
        matrices of a stack.
        """
        on_accelerator = any(budget > 0 for key, budget in request.budgets.items() if key not in ("cpu", "disk"))
        key = (request.dtype, request.workload, on_accelerator)
        if key not in self._needs:
            self._needs[key] = needs_of(request.model, request.workload, request.dtype, on_accelerator=on_accelerator)
        needs = self._needs[key]
        if request.weight_format is None or not needs.workspace_bytes:
            return needs
        self.inventory(request)
        unpacked_bytes = self._largest_packed[request.weight_format.name] * compute_dtype(request.model, request.dtype).itemsize
        return replace(needs, workspace_bytes=needs.workspace_bytes + unpacked_bytes)

    def facts(self, request: Request) -> ModelFacts:
        """What the model computes, for predictions."""
        if self._facts is None:
            self._facts = facts_of(request.model, self.inventory(request))
        return self._facts


def _unpacked_elements(weight: torch.Tensor) -> int:
    """Elements of a packed weight that are unpacked at once. Experts run one by one; what holds one matrix may ask for the next."""
    return weight.numel() if weight.dim() < 3 else weight.numel() // max(1, weight.shape[0]) * min(2, weight.shape[0])

"""What a weight conversion of transformers does, found by running it on tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...loading import Computed, Concatenate, Slice, Source, Stack, Transpose, Whole
from ...protocols import TensorSpec

__all__ = ["Collected", "trace_conversion"]

aten = torch.ops.aten

Collected = Mapping[str, Sequence[str]]
"""For each source pattern of a converter, the checkpoint tensors that it caught, in the order in which they are stacked."""


def trace_conversion(
    converter: Any, first_target: str, collected: Collected, specs: Mapping[str, TensorSpec], model: Any, dtype: torch.dtype
) -> dict[str, Source]:
    """The source of every model tensor that `converter` (a `WeightConverter` of transformers) makes from the tensors in `collected`.

    The conversion itself runs, on meta tensors, while every tensor operation is written down. What consists of stacking, concatenating,
    cutting and transposing alone becomes a source that needs no computation; anything else becomes a `Computed` one, which runs the
    conversion on the tensors that were read.

    Args:
        first_target: name of the model tensor that the conversion starts from, as transformers renames the sources to it.
        specs: shape and dtype of the tensors in the checkpoint.
        dtype: what the sources are cast to before the conversion.

    Raises:
        Whatever the conversion raises when the tensors do not fit it.
    """
    tape = _Tape()
    stand_ins: dict[str, list[torch.Tensor]] = {}
    for pattern, names in collected.items():
        stand_ins[pattern] = [torch.empty(specs[name].shape, dtype=dtype, device="meta") for name in names]
        for name, stand_in in zip(names, stand_ins[pattern], strict=True):
            tape.write(stand_in, Whole(name))
    with tape:
        results = _convert(converter, first_target, stand_ins, model)

    names = [name for pattern in collected for name in collected[pattern]]
    sources: dict[str, Source] = {}
    for target, result in results.items():
        source = tape.source_of(result)
        if source is None:
            conversion = _Conversion(converter, first_target, collected, model, dtype, target)
            source = Computed(tuple(Whole(name) for name in names), conversion, tuple(result.shape))
        sources[target] = source
    return sources


@dataclass(frozen=True, slots=True)
class _Conversion:
    """A conversion that has to be computed: called with all tensors that it needs, in order, it gives `target`."""

    converter: Any
    first_target: str
    collected: Collected
    model: Any
    dtype: torch.dtype
    target: str

    def __call__(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        remaining = iter(tensors)
        arranged = {pattern: [next(remaining).to(self.dtype) for _ in names] for pattern, names in self.collected.items()}
        result = _convert(self.converter, self.first_target, arranged, self.model)[self.target]
        return result.to(self.dtype)


def _convert(converter: Any, first_target: str, tensors: dict[str, list[torch.Tensor]], model: Any) -> dict[str, torch.Tensor]:
    """Runs a copy of the converter; the results under the full names of the model."""
    copy = deepcopy(converter)
    for pattern, values in tensors.items():
        copy.collected_tensors[pattern] = list(values)
    results = copy.convert(first_target, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in results.items()}


class _Tape(TorchDispatchMode):
    """Writes down how each tensor comes from checkpoint tensors, as long as it is by moving elements only."""

    def __init__(self) -> None:
        super().__init__()
        # The tensors are kept beside their ids, so that no id is given twice.
        self._written: dict[int, tuple[torch.Tensor, Source]] = {}
        self._changed_in_place = False

    def write(self, tensor: torch.Tensor, source: Source) -> None:
        self._written[id(tensor)] = (tensor, source)

    def source_of(self, tensor: torch.Tensor) -> Source | None:
        """How the tensor is made, or None where that takes a computation."""
        if self._changed_in_place:
            return None
        _, source = self._written.get(id(tensor), (None, None))
        return source

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            self._changed_in_place = True
            return result
        rule = _RULES.get(func)
        if rule is not None and not _casts(kwargs):
            inputs = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            sources = [self.source_of(tensor) for tensor in inputs]
            if all(source is not None for source in sources):
                outputs = list(result) if isinstance(result, (list, tuple)) else [result]
                for output, source in zip(outputs, rule(sources, list(inputs), outputs, list(args[1:])), strict=True):
                    if source is not None:
                        self.write(output, source)
        return result


def _casts(kwargs: Mapping[str, Any] | None) -> bool:
    """Whether the keyword arguments of a copying operation ask for a dtype, which may change values; a layout does not."""
    return kwargs is not None and kwargs.get("dtype") is not None


Rule = Callable[[list[Any], list[torch.Tensor], list[torch.Tensor], list[Any]], Sequence["Source | None"]]


def _dimension(arguments: list[Any], position: int, tensor: torch.Tensor) -> int:
    dim = int(arguments[position]) if len(arguments) > position else 0
    return dim % tensor.dim()


def _stack(sources: list[Source], inputs: list[torch.Tensor], outputs: list[torch.Tensor], arguments: list[Any]) -> list[Source]:
    return [Stack(tuple(sources), _dimension(arguments, 0, outputs[0]))]


def _concatenate(sources: list[Source], inputs: list[torch.Tensor], outputs: list[torch.Tensor], arguments: list[Any]) -> list[Source]:
    if len(sources) == 1:
        return sources
    return [Concatenate(tuple(sources), _dimension(arguments, 0, outputs[0]))]


def _split(sources: list[Source], inputs: list[torch.Tensor], outputs: list[torch.Tensor], arguments: list[Any]) -> list[Source]:
    dim = _dimension(arguments, 1, inputs[0])
    pieces: list[Source] = []
    start = 0
    for output in outputs:
        pieces.append(Slice(sources[0], dim, start, output.shape[dim]))
        start += output.shape[dim]
    return pieces


def _slice(sources: list[Source], inputs: list[torch.Tensor], outputs: list[torch.Tensor], arguments: list[Any]) -> list[Source | None]:
    dim = _dimension(arguments, 0, inputs[0])
    start, step = (arguments[1] if len(arguments) > 1 else 0) or 0, arguments[3] if len(arguments) > 3 else 1
    if step != 1 or start < -inputs[0].shape[dim]:
        return [None]
    start = min(start % inputs[0].shape[dim] if start < 0 else start, inputs[0].shape[dim])
    return [Slice(sources[0], dim, start, outputs[0].shape[dim])]


def _transpose(sources: list[Source], inputs: list[torch.Tensor], outputs: list[torch.Tensor], arguments: list[Any]) -> list[Source]:
    return [Transpose(sources[0], _dimension(arguments, 0, inputs[0]), _dimension(arguments, 1, inputs[0]))]


def _same_values(
    sources: list[Source], inputs: list[torch.Tensor], outputs: list[torch.Tensor], arguments: list[Any]
) -> list[Source | None]:
    return [sources[0] if outputs[0].shape == inputs[0].shape else None]


_RULES: dict[Any, Rule] = {
    aten.stack.default: _stack,
    aten.cat.default: _concatenate,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.slice.Tensor: _slice,
    aten.transpose.int: _transpose,
    aten.alias.default: _same_values,
    aten.clone.default: _same_values,
    aten.detach.default: _same_values,
    aten.view.default: _same_values,
    aten._to_copy.default: _same_values,
}

"""What packing has done to a model: bytes packed, bytes left and why, and how far the packed weights are from the original ones."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..text import bytes_text, names_text
from .config import Scheme
from .four_bit import FourBit
from .int8 import Int8
from .matrices import is_linear
from .packed_format import chosen_by
from .replacement import packed_layers
from .selection import select
from .stacks import is_stack

__all__ = ["LayerReport", "QuantizationReport", "note_bits", "note_scheme", "report"]

_SCHEME = "_bigmodel_scheme"
_KEY_RULES = "_bigmodel_key_rules"


@dataclass(frozen=True, slots=True)
class LayerReport:
    """A module with parameters of its own."""

    name: str
    format: str
    """Of the packed weight; empty for a module that is left as it is."""
    reason: str
    """Why it is left; empty for a packed one."""
    nbytes: int
    """Of its parameters, packed or not, with all companions."""
    unpacked_bytes: int
    """Of the same parameters, were none packed."""
    relative_error: float | None = None
    """Frobenius norm of what packing has changed, over that of the original weight; None where nobody asked."""
    max_error: float | None = None
    """The largest change of one element."""


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """All modules with parameters. `print` it for a table."""

    layers: tuple[LayerReport, ...]

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed layers."""
        return sum(layer.nbytes for layer in self.layers if layer.format)

    @property
    def packed_from_bytes(self) -> int:
        """What the packed layers would take unpacked."""
        return sum(layer.unpacked_bytes for layer in self.layers if layer.format)

    @property
    def left_bytes(self) -> int:
        """Bytes of what is left as it is."""
        return sum(layer.nbytes for layer in self.layers if not layer.format)

    def left(self) -> dict[str, int]:
        """Why modules are left → their bytes, the largest first."""
        reasons: dict[str, int] = {}
        for layer in self.layers:
            if not layer.format:
                reasons[layer.reason] = reasons.get(layer.reason, 0) + layer.nbytes
        return dict(sorted(reasons.items(), key=lambda item: -item[1]))

    def __str__(self) -> str:
        packed = [layer for layer in self.layers if layer.format]
        lines = [
            f"{len(packed)} layers packed: {bytes_text(self.packed_bytes)}, unpacked {bytes_text(self.packed_from_bytes)}",
            f"left: {bytes_text(self.left_bytes)}",
        ]
        for reason, nbytes in self.left().items():
            names = [layer.name for layer in self.layers if not layer.format and layer.reason == reason]
            lines.append(f"  {bytes_text(nbytes)}: {reason} ({names_text(names[:8])}{', …' if len(names) > 8 else ''})")
        measured = sorted((layer for layer in packed if layer.relative_error is not None), key=lambda layer: -(layer.relative_error or 0))
        if measured:
            lines.append("largest relative errors:")
            lines += [f"  {layer.relative_error:.4f} (max {layer.max_error:.3g})  {layer.name}, {layer.format}" for layer in measured[:10]]
        return "\n".join(lines)


def note_scheme(model: nn.Module, scheme: Scheme) -> None:
    """Lets the model remember how it was packed, for the report."""
    model.__dict__[_SCHEME] = scheme


def note_key_rules(model: nn.Module, rules: Callable[[nn.Module], Any]) -> None:
    """Lets the model remember what makes the rules that it was loaded with, for the report. (They themselves may refer to the model.)"""
    model.__dict__[_KEY_RULES] = rules


def key_rules(model: nn.Module) -> Any:
    """The rules that the model was loaded with; None if it remembers none."""
    make = model.__dict__.get(_KEY_RULES)
    return None if make is None else make(model)


def note_bits(model: nn.Module) -> None:
    """Sets `is_loaded_in_4bit` and `is_loaded_in_8bit`, by which libraries know what bitsandbytes packed; layers get their names."""
    layers = packed_layers(model)
    for name, layer in layers.items():
        layer.note_name(name)
    packings = [layer.packing for layer in layers.values()]
    four, eight = (any(isinstance(packing, kind) for packing in packings) for kind in (FourBit, Int8))
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = four, eight and not four  # type: ignore[assignment]


def report(
    model: nn.Module,
    original: Callable[[str], torch.Tensor] | None = None,
    bringing: Callable[[nn.Module], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> QuantizationReport:
    """The report of a model, packed or not; nothing that is offloaded is fetched, unless errors are asked for.

    `original` gives the unpacked weight of a full name; with it, each packed weight is unpacked once and compared in float32,
    within `bringing(layer)`, which makes the layer's tensors real.
    """
    return QuantizationReport(tuple(_layers(model, original, bringing)))


def _layers(
    model: nn.Module, original: Callable[[str], torch.Tensor] | None, bringing: Callable[[nn.Module], AbstractContextManager[Any]]
) -> Iterator[LayerReport]:
    packed = packed_layers(model)
    scheme: Scheme | None = model.__dict__.get(_SCHEME)
    reasons = (select(model) if scheme is None else chosen_by(scheme.format, model)).left
    seen: set[int] = set()
    for name, module in model.named_modules():
        own = [parameter for parameter in module._parameters.values() if parameter is not None and id(parameter) not in seen]
        seen |= {id(parameter) for parameter in own}
        nbytes = sum(parameter.numel() * parameter.element_size() for parameter in own)
        if not own:
            continue
        layer = packed.get(name)
        if layer is None:
            yield LayerReport(name, "", _why_left(name, module, reasons.get(name)), nbytes, nbytes)
            continue
        bias = getattr(layer, "bias", None)
        unpacked_bytes = math.prod(layer.shape) * layer.original_dtype.itemsize
        unpacked_bytes += 0 if bias is None else bias.numel() * bias.element_size()
        errors: tuple[float, float] | tuple[None, None] = (None, None)
        if original is not None:
            exact = original(layer.original_name(name))
            with bringing(layer):
                errors = _errors(layer.unpacked(), exact.T if getattr(layer, "from_transposed", False) else exact)
        yield LayerReport(name, layer.packing.name, "", nbytes, unpacked_bytes, *errors)


def _why_left(name: str, module: nn.Module, reason: str | None) -> str:
    if reason is not None:
        return reason
    if is_linear(module) or is_stack(name, module):
        return "the checkpoint has it unpacked"
    return "it is an embedding" if isinstance(module, nn.Embedding) else "it is no linear layer"


def _errors(unpacked: torch.Tensor, original: torch.Tensor) -> tuple[float, float]:
    exact = original.detach().to(unpacked.device, torch.float32)
    change = unpacked.detach().to(torch.float32) - exact
    return (change.norm() / exact.norm().clamp(min=torch.finfo(torch.float32).tiny)).item(), change.abs().max().item()

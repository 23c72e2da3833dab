"""What the configurations beside a checkpoint say of its packed weights, held against what their tensors are.

Names and shapes of tensors are enough to read them; a configuration that tells of something else is that of another checkpoint, or the
tensors are. Configurations that give single modules bits of their own (`dynamic`, `extra_config`, several groups) are not held against any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..errors import CheckpointError
from .beside import descriptions_beside
from .entry import Entry

__all__ = ["OTHERS", "PackedKind", "described_blocks", "refuse_contradictions", "refuse_others_said"]

METHODS: Final = ("gptq", "awq", "compressed-tensors", "fp8", "bitsandbytes", "mxfp4")
"""What configurations call the ways of packing that are known here. Of other methods, nothing that they say is."""
OF_SINGLE_MODULES: Final = ("dynamic", "extra_config")
OTHERS: Final = "One of the two is of another checkpoint: get both again, or take the configuration away if the weights are right."


@dataclass(frozen=True, slots=True)
class PackedKind:
    """What the tensors of one packed matrix tell."""

    method: str
    """One of `METHODS`."""
    packed: Entry
    scales: Entry
    bits: int
    """Of an element."""
    columns: int
    """Elements of a row, along which groups lie."""
    groups: int
    """Groups of a row."""


def refuse_contradictions(kind: PackedKind) -> None:
    """Raises `CheckpointError`, naming both, where a configuration beside the file says another method, bits or group size than tensors."""
    for config, content in _of_method(kind.packed, kind.method).items():
        bits, group_size = _of_groups(content) if kind.method == "compressed-tensors" else _of_all(content)
        if bits is not None and bits != kind.bits:
            raise CheckpointError(
                f"{config}: says {bits} bits, but {kind.packed.name!r} of shape {list(kind.packed.shape)} in {kind.packed.file.name} holds "
                f"{kind.bits}-bit integers for {kind.columns} columns. {OTHERS}"
            )
        expected = kind.groups if group_size is None else -(-kind.columns // group_size) if group_size > 0 else 1
        if expected != kind.groups:
            told = f"a group size of {group_size}" if group_size is not None and group_size > 0 else "one group for a whole row"
            raise CheckpointError(
                f"{config}: says {told}, which makes {expected} of {kind.columns} columns, but {kind.scales.name!r} of shape "
                f"{list(kind.scales.shape)} in {kind.scales.file.name} is for {kind.groups} groups (of {-(-kind.columns // kind.groups)}). "
                f"{OTHERS}"
            )


def refuse_others_said(packed: Entry, method: str, facts: Mapping[str, Any]) -> None:
    """Raises `CheckpointError`, naming both, where a configuration beside the file says another method, or another value of a fact."""
    for config, content in _of_method(packed, method).items():
        for key, expected in facts.items():
            if content.get(key) not in (None, expected):
                raise CheckpointError(
                    f"{config}: says {key} {content[key]!r}, but {packed.name!r} in {packed.file.name} is packed with {key} {expected!r}. "
                    f"{OTHERS}"
                )


def _of_method(packed: Entry, method: str) -> Mapping[Path, Mapping[str, Any]]:
    """The configurations beside the file that speak of this method, or of none. Raises `CheckpointError` where one says another."""
    found = {}
    for config, content in descriptions_beside(packed.file).items():
        said = content.get("quant_method")
        if said in (None, method):
            found[config] = content
        elif said in METHODS:
            raise CheckpointError(
                f"{config}: says quant_method {said!r}, but {packed.name!r} in {packed.file.name} is packed as {method!r} packs. {OTHERS}"
            )
    return found


def described_blocks(weight: Entry) -> tuple[Path, tuple[int, int]] | None:
    """Rows and columns that share a scale of 8-bit floats, and the configuration that says so; None where none does."""
    for config, content in descriptions_beside(weight.file).items():
        size = content.get("weight_block_size")
        if content.get("quant_method") == "fp8" and isinstance(size, list) and len(size) == 2:
            rows, columns = (_whole(each) for each in size)
            if rows is not None and columns is not None and rows > 0 and columns > 0:
                return config, (rows, columns)
    return None


def _of_all(content: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Bits and group size (-1: all of a row) of every matrix, as GPTQ's and AWQ's tools write them; None for what is not said."""
    if any(content.get(each) for each in OF_SINGLE_MODULES):
        return None, None
    return _whole(content.get("bits")), _whole(content.get("group_size"))


def _of_groups(content: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """The same of compressed-tensors."""
    groups = content.get("config_groups")
    described = list(groups.values()) if isinstance(groups, dict) else []
    weights = described[0].get("weights") if len(described) == 1 and isinstance(described[0], dict) else None
    if not isinstance(weights, dict):
        return None, None
    strategy = weights.get("strategy")
    size = -1 if strategy == "channel" else _whole(weights.get("group_size")) if strategy in (None, "group") else None
    return _whole(weights.get("num_bits")), size


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None

"""Budgets that are names of accelerators: `{0: "RTX 4090"}` for a card that one does not have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from .devices import as_key
from .errors import MachineError, PlanError
from .planning.hardware import Accelerator, find_accelerator
from .planning.memory import budget_items
from .planning.sizes import convert_file_size_to_int
from .text import bytes_text

__all__ = ["Budgets", "named_budgets"]

MEMORY_SHARE: Final = 0.9
"""Of an accelerator's published memory, what can be planned with: error correction, the driver, torch's own context and its allocator's
gaps take the rest (of 16 GB a T4 offers 14.6 GiB to torch, of 24 GB an L4 22.0)."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """Budgets in bytes or as sizes, and what is known of the hardware behind them."""

    max_memory: Mapping[Any, Any] | None
    machine: dict[Any, str] | None = None
    """Names of the accelerators by device, where all of them are known by name."""
    notes: tuple[str, ...] = ()


def named_budgets(max_memory: Mapping[Any, Any] | None) -> Budgets:
    """The same budgets, names of accelerators replaced by 90 % of their memory, in bytes.

    Raises `PlanError` for text that is neither a size nor the name of one accelerator, and for one whose memory depends on what was bought.
    """
    if max_memory is None:
        return Budgets(None)
    sizes: dict[Any, Any] = {}
    cards: dict[Any, Accelerator] = {}
    for device, size in budget_items(max_memory):
        card = _card(device, size) if isinstance(size, str) else None
        if card is None:
            sizes[device] = size
            continue
        if card.memory_bytes is None:
            raise PlanError(
                f"Budget of device {device!r}: {card.name} comes with several sizes of memory: give bytes, or text such as '24GiB'."
            )
        cards[device] = card
        sizes[device] = int(MEMORY_SHARE * card.memory_bytes)
    accelerators = [device for device in sizes if as_key(device, where="in max_memory") not in ("cpu", "disk")]
    machine = {device: card.name for device, card in cards.items()} if cards and len(cards) == len(accelerators) else None
    notes = [
        f"{name}: {MEMORY_SHARE:.0%} of its {bytes_text(memory_bytes)} are planned with; driver, error correction and torch take the rest."
        for name, memory_bytes in {card.name: card.memory_bytes for card in cards.values()}.items()
    ]
    return Budgets(sizes, machine, tuple(notes))


def _card(device: object, size: str) -> Accelerator | None:
    """The accelerator of this name; None for a size."""
    try:
        convert_file_size_to_int(size)
    except PlanError as not_a_size:
        is_accelerator = as_key(device, where="in max_memory") not in ("cpu", "disk")
        if not is_accelerator or not any(letter.isalpha() for letter in size) or size.strip()[:1] in "-+.":
            raise PlanError(f"Budget of device {device!r}: {not_a_size}") from not_a_size
        try:
            return find_accelerator(size)
        except MachineError as not_a_card:
            if size.strip()[:1].isnumeric():
                raise PlanError(f"Budget of device {device!r}: {not_a_size}") from not_a_card
            raise PlanError(f"Budget of device {device!r}: {size!r} is no size such as '24GiB'. {not_a_card}") from not_a_card
    return None

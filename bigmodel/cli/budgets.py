"""Budgets on the command line: `--gpu 24GiB --gpu "RTX 4090" --cpu 64GiB`, or `--max-memory 0=24GiB,cpu=64GiB`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from ..errors import PlanError

__all__ = ["MaxMemory", "joined_budgets", "parse_max_memory"]

MaxMemory = Annotated[
    str | None,
    typer.Option("--max-memory", help="Budgets: DEVICE=SIZE, separated by commas (0=2GiB,cpu=8GiB). Measured when not given."),
]


def parse_max_memory(text: str | None) -> dict[int | str, int | str] | None:
    """`"0=2GiB,cpu=8GiB"` → `{0: "2GiB", "cpu": "8GiB"}`. Raises `PlanError` on anything else."""
    if text is None:
        return None
    budgets: dict[int | str, int | str] = {}
    for part in text.split(","):
        device, separator, size = (piece.strip() for piece in part.partition("="))
        if not (device and separator and size):
            raise PlanError(f"--max-memory: cannot read {part!r}. Write DEVICE=SIZE, separated by commas, as in 0=2GiB,cpu=8GiB.")
        key = int(device) if device.isdigit() else device
        if key in budgets:
            raise PlanError(f"--max-memory: {device} stands there twice. Give it one budget.")
        budgets[key] = _size(size)
    return budgets


def joined_budgets(max_memory: str | None, gpus: Sequence[str], cpu: str | None, disk: str | None) -> dict[int | str, int | str] | None:
    """What all options together say; None where none is given. Raises `PlanError` where two say something about one device."""
    budgets: dict[int | str, int | str] = {index: _size(size) for index, size in enumerate(gpus)}
    budgets |= {name: _size(size) for name, size in (("cpu", cpu), ("disk", disk)) if size is not None}
    listed = parse_max_memory(max_memory) or {}
    if twice := [device for device in listed if device in budgets]:
        option = f"--{twice[0]}" if isinstance(twice[0], str) else f"--gpu (the cards are numbered from 0 on, {len(gpus)} of them)"
        raise PlanError(f"--max-memory and {option} both say something about device {twice[0]!r}: use one of them.")
    return {**listed, **budgets} or None


def _size(text: str) -> int | str:
    return int(text) if text.isdigit() else text

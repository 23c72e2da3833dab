"""`bigmodel plan CHECKPOINT --max-memory 0=2GiB,cpu=8GiB`: where everything would go."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from torch import nn

from .. import planning
from ..errors import MissingPackageError, PlanError
from ..integrations.transformers import empty_model
from ..loading import Checkpoint
from ..protocols import TensorSpec

__all__ = ["parse_max_memory", "plan"]

MaxMemory = Annotated[
    str | None,
    typer.Option("--max-memory", help="Budgets: DEVICE=SIZE, separated by commas (0=2GiB,cpu=8GiB). Measured when not given."),
]


def plan(
    checkpoint: Annotated[
        Path, typer.Argument(help="File or folder; with a config.json beside it, the model's code is used (transformers).")
    ],
    max_memory: MaxMemory = None,
    dtype: Annotated[str | None, typer.Option(help="Load floating weights as this dtype (float16, bfloat16, …).")] = None,
    strategy: Annotated[str, typer.Option(help="auto, balanced, balanced_low_0 or sequential.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Plans the device map of a checkpoint from its headers; no weights are read. Devices need not exist on this machine."""
    model = _model(checkpoint)
    found = planning.plan(model, parse_max_memory(max_memory), dtype=dtype, mode=strategy)
    if as_json:
        print(found.to_json())
    else:
        print(found)


def _model(where: Path) -> nn.Module:
    """The transformers model on meta where there is a config for it; else a tree made from the tensors' names."""
    if where.is_dir() and (where / "config.json").is_file():
        try:
            return empty_model(where)
        except MissingPackageError:
            pass  # without transformers the names have to do
    entries = Checkpoint.open(where).entries
    return planning.skeleton({name: TensorSpec(entry.shape, entry.dtype) for name, entry in entries.items()})


def parse_max_memory(text: str | None) -> dict[int | str, int | str] | None:
    """`"0=2GiB,cpu=8GiB"` → `{0: "2GiB", "cpu": "8GiB"}`. Raises `PlanError` on anything else."""
    if text is None:
        return None
    budgets: dict[int | str, int | str] = {}
    for part in text.split(","):
        device, separator, size = (piece.strip() for piece in part.partition("="))
        if not (device and separator and size):
            raise PlanError(f"--max-memory: cannot read {part!r}. Write DEVICE=SIZE, separated by commas, as in 0=2GiB,cpu=8GiB.")
        budgets[int(device) if device.isdigit() else device] = int(size) if size.isdigit() else size
    return budgets

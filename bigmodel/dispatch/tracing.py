"""The refusal to be traced: a trace or an exported program keeps its weights, and those of an offloaded model come and go."""

from __future__ import annotations

import torch

from ..errors import DispatchError

__all__ = ["refuse_tracing"]


def refuse_tracing(name: str) -> None:
    """Raises `DispatchError` if `torch.jit.trace` or `torch.export.export` records the forward of the offloaded module `name`."""
    if torch._C._get_tracing_state() is not None:
        by = "torch.jit.trace"
    elif torch.compiler.is_exporting():
        by = "torch.export"
    else:
        return
    raise DispatchError(
        f"{by} cannot record {name}, whose weights are offloaded and in memory during its forward only: "
        "bigmodel.undispatch(model) first, or export the model before dispatching it."
    )

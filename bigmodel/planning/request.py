"""What is asked of a plan, in one value, so that it can be asked again with one thing changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch import nn

from ..devices import DeviceKey
from ..errors import PlanError
from ..machine import Machine
from ..protocols import WeightFormat
from .needs import Workload
from .sizes import DtypeLike

__all__ = ["EXECUTIONS", "MODES", "OBJECTIVES", "Request"]

MODES = ("auto", "balanced", "balanced_low_0", "sequential")
OBJECTIVES = (None, "latency", "throughput")
EXECUTIONS = ("main", "auto")


@dataclass(frozen=True, slots=True)
class Request:
    """The model, what the devices offer, how the model will be loaded, and the run that it is for."""

    model: nn.Module
    budgets: Mapping[DeviceKey, int]
    """Bytes by device, in device order (`memory.parse_budgets`)."""
    no_split_module_classes: str | Collection[str] | None = None
    dtype: DtypeLike | None = None
    special_dtypes: Mapping[str, DtypeLike] | None = None
    weight_format: WeightFormat | None = None
    mode: str = "auto"
    offload_buffers: bool = False
    workload: Workload = field(default_factory=Workload)
    machine: Machine | None = None
    """The rates to predict with; None: nothing is predicted."""
    objective: str | None = None
    execution: str = "main"
    """Where blocks that rest in RAM run: on the main device, or, with "auto", where a step is expected to take less."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise PlanError(f"Mode {self.mode!r} is unknown. Use one of {', '.join(MODES)}.")
        if self.objective not in OBJECTIVES:
            raise PlanError(f"Objective {self.objective!r} is unknown. Use 'latency' or 'throughput', or none.")
        if self.execution not in EXECUTIONS:
            raise PlanError(f"Execution {self.execution!r} is unknown. Use 'main' (what is offloaded runs on the main device) or 'auto'.")
        chooses = f"objective={self.objective!r}" if self.objective is not None else f"execution={self.execution!r}"
        if self.machine is None and (self.objective is not None or self.execution != "main"):
            raise PlanError(
                f"{chooses} needs to know how fast the machine is: measure it once with `bigmodel bench`, or name the accelerators, as in "
                "machine='RTX 4090'."
            )

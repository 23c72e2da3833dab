"""Which process this is and how it trains, under the path that scripts import."""

from __future__ import annotations

from .training.accelerator_state import AcceleratorState
from .training.enums import DistributedType
from .training.gradient_state import GradientState
from .training.state import PartialState

__all__ = ["AcceleratorState", "DistributedType", "GradientState", "PartialState"]

"""Training with DeepSpeed: its config, stand-ins for what it makes, and its parts of a loop."""

from __future__ import annotations

from ..training.plugins.deepspeed_config import HfDeepSpeedConfig
from ..training.plugins.deepspeed_stand_ins import DummyOptim, DummyScheduler
from ..training.plugins.deepspeed_wrappers import DeepSpeedEngineWrapper, DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper

__all__ = [
    "DeepSpeedEngineWrapper",
    "DeepSpeedOptimizerWrapper",
    "DeepSpeedSchedulerWrapper",
    "DummyOptim",
    "DummyScheduler",
    "HfDeepSpeedConfig",
]

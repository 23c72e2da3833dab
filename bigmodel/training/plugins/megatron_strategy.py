"""Training with Megatron-LM: what an `Accelerator` says to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import TrainingError
from ..accelerator_state import AcceleratorState
from ..strategy import Strategy

if TYPE_CHECKING:
    from ..accelerator import Accelerator

__all__ = ["MegatronStrategy"]


class MegatronStrategy(Strategy):
    """Raises `TrainingError`, saying what trains here: Megatron-LM's kernels need CUDA devices, and its models its own training step."""

    def __init__(self, accelerator: Accelerator):
        device = accelerator.device
        AcceleratorState._reset_state()  # the next Accelerator in a notebook may be another
        if device.type == "cpu":
            raise TrainingError(
                "megatron_lm_plugin: Megatron-LM computes on CUDA devices, and this process on the CPU. Here a "
                "FullyShardedDataParallelPlugin or a DeepSpeedPlugin shares a model between processes."
            )
        raise TrainingError(
            "megatron_lm_plugin: Accelerator does not run Megatron-LM's training step. A FullyShardedDataParallelPlugin or a "
            "DeepSpeedPlugin shares a model between processes; scripts that drive megatron-core themselves find the plugin's settings in "
            "plugin.initialize_model_parallel() and plugin.transformer_config(...)."
        )

"""PyTorch models that are too big for where they have to run: plan where every weight lives, load it there, bring it in time."""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

# Scripts that import the package alone reach these as its attributes.
from . import big_modeling as big_modeling
from . import data_loader as data_loader
from . import hooks as hooks
from . import launchers as launchers
from . import local_sgd as local_sgd
from . import logging as logging
from . import state as state
from . import utils as utils
from .api import (
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    load_and_dispatch,
    load_checkpoint_and_dispatch,
    save_model,
)
from .dispatch import Activity, Timeline, execution_devices, get_parameter, placement, timeline, undispatch, update_parameter
from .errors import (
    BigModelError,
    CheckpointError,
    CheckpointNotFoundError,
    DispatchError,
    MachineError,
    MatchError,
    MissingPackageError,
    PlanError,
    QuantizationError,
    TrainingError,
)
from .integrations.transformers import from_pretrained
from .loading import Checkpoint, init_empty_weights, init_on_device, load_checkpoint_in_model
from .machine import Machine
from .measuring import measure_machine
from .planning import Plan, infer_auto_device_map
from .plans import plan
from .quantization import BnbQuantizationConfig
from .quantize import load_and_quantize_model, quantization_report
from .training.accelerator import Accelerator
from .training.configuration import DataLoaderConfiguration
from .training.data import skip_first_batches
from .training.enums import DDPCommunicationHookType, DistributedType
from .training.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)
from .training.launchers import debug_launcher, notebook_launcher
from .training.local_sgd import LocalSGD
from .training.memory import find_executable_batch_size
from .training.parallelism import ParallelismConfig
from .training.plugins.deepspeed import DeepSpeedPlugin
from .training.plugins.fsdp import FullyShardedDataParallelPlugin
from .training.random import synchronize_rng_states
from .training.state import PartialState

__all__ = [
    "Accelerator",
    "Activity",
    "AutocastKwargs",
    "BigModelError",
    "BnbQuantizationConfig",
    "Checkpoint",
    "CheckpointError",
    "CheckpointNotFoundError",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DispatchError",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "InitProcessGroupKwargs",
    "LocalSGD",
    "Machine",
    "MachineError",
    "MatchError",
    "MissingPackageError",
    "ParallelismConfig",
    "PartialState",
    "Plan",
    "PlanError",
    "ProfileKwargs",
    "QuantizationError",
    "Timeline",
    "TrainingError",
    "cpu_offload",
    "cpu_offload_with_hook",
    "debug_launcher",
    "disk_offload",
    "dispatch_model",
    "execution_devices",
    "find_executable_batch_size",
    "from_pretrained",
    "get_parameter",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_and_dispatch",
    "load_and_quantize_model",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "measure_machine",
    "notebook_launcher",
    "placement",
    "plan",
    "quantization_report",
    "save_model",
    "skip_first_batches",
    "synchronize_rng_states",
    "timeline",
    "undispatch",
    "update_parameter",
]

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import accelerator as accelerator
    from . import commands as commands
    from . import optimizer as optimizer
    from . import parallelism_config as parallelism_config
    from . import scheduler as scheduler
    from . import tracking as tracking
else:
    _LATER = ("accelerator", "commands", "optimizer", "parallelism_config", "scheduler", "tracking")
    """Modules that are attributes as well, imported when somebody asks for them."""

    def __getattr__(name):
        if name in _LATER:
            return _import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *_LATER})

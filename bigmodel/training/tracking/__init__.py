"""Experiment trackers: one file a library, which is imported when a run begins."""

from __future__ import annotations

from .aim import AimTracker
from .chosen import LOGGER_TYPE_TO_CLASS, filter_trackers, get_available_trackers, register_tracker_class
from .clearml import ClearMLTracker
from .comet import CometMLTracker
from .dvclive import DVCLiveTracker
from .mlflow import MLflowTracker
from .swanlab import SwanLabTracker
from .tensorboard import TensorBoardTracker
from .tracker import GeneralTracker, on_main_process
from .trackio import TrackioTracker
from .wandb import WandBTracker

__all__ = [
    "LOGGER_TYPE_TO_CLASS",
    "AimTracker",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "GeneralTracker",
    "MLflowTracker",
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackioTracker",
    "WandBTracker",
    "filter_trackers",
    "get_available_trackers",
    "on_main_process",
    "register_tracker_class",
]

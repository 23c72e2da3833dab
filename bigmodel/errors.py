"""Every error that bigmodel raises on purpose.

Each one also derives from the built-in type that existing scripts catch for the same mistake, so `except ValueError` goes on working.
A message tells what happened, to which name, with which numbers, and what to do.
"""

from __future__ import annotations

__all__ = [
    "BigModelError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "DispatchError",
    "DistributedOperationException",
    "IncompleteTrackerError",
    "MachineError",
    "MatchError",
    "MissingPackageError",
    "PlanError",
    "QuantizationError",
    "StructureError",
    "TrainingError",
    "WrongTypeError",
]


class BigModelError(Exception):
    """Base of all errors raised by bigmodel."""


class PlanError(BigModelError, ValueError):
    """A model, a budget or a device map that cannot be planned with."""


class CheckpointError(BigModelError, ValueError):
    """A checkpoint that is damaged, ambiguous, unsafe or not what it says."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """A checkpoint, or a file that its index names, is not there."""

    # OSError formats its arguments as "[Errno …]"; the message is the whole story here.
    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class MatchError(CheckpointError, RuntimeError):
    """Checkpoint and model do not fit each other: missing, unexpected or misshapen tensors, lost scales."""


class DispatchError(BigModelError, RuntimeError):
    """A dispatched model is asked for something that it cannot do without being wrong."""


class MachineError(BigModelError, ValueError):
    """Rates of a machine that cannot be measured, read, kept or found by a name."""


class QuantizationError(BigModelError, ValueError):
    """A quantization that cannot be: a config with a mistake in it, a weight that cannot be packed, packed bytes that do not fit."""


class MissingPackageError(BigModelError, ImportError):
    """An optional package is needed; the message says which, and how to install it."""


class TrainingError(BigModelError, ValueError, RuntimeError):
    """Processes, settings or data of a training job that do not fit together."""


class WrongTypeError(TrainingError, TypeError):
    """An argument of another type than it takes."""


class StructureError(TrainingError, TypeError):
    """A nested structure with something else in it, or of another make, than a function can take."""


class IncompleteTrackerError(TrainingError, NotImplementedError):
    """A tracker of a user's own that lacks what is asked of trackers."""


class DistributedOperationException(TrainingError):
    """Processes that come to a collective with tensors, structures or operations that do not fit each other; raised in all of them."""

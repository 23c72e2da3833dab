"""torchdata's loader, which asks datasets and samplers for their own states."""

from __future__ import annotations

import inspect
from typing import Any

from ...errors import MissingPackageError

__all__ = ["stateful_loader"]


def stateful_loader(dataset: Any, **arguments: Any) -> Any:
    """A `torchdata.stateful_dataloader.StatefulDataLoader`; arguments that its release does not know yet are left out.

    Raises:
        MissingPackageError: torchdata 0.8 or later is not installed.
    """
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError as error:
        raise MissingPackageError("use_stateful_dataloader needs torchdata 0.8 or later: pip install 'bigmodel[stateful]'.") from error
    known = inspect.signature(StatefulDataLoader).parameters
    return StatefulDataLoader(dataset, **{name: value for name, value in arguments.items() if name in known})

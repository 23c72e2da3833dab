"""The utility functions, under the path that scripts import. Each lives in its room; this only names them."""

from __future__ import annotations

from .bnb import *  # noqa: F403
from .bnb import __all__ as _bnb
from .constants import *  # noqa: F403
from .constants import __all__ as _constants
from .dataclasses import *  # noqa: F403
from .dataclasses import __all__ as _dataclasses
from .memory import *  # noqa: F403
from .memory import __all__ as _memory
from .modeling import *  # noqa: F403
from .modeling import __all__ as _modeling
from .offload import *  # noqa: F403
from .offload import __all__ as _offload
from .operations import *  # noqa: F403
from .operations import __all__ as _operations

__all__ = [*_bnb, *_constants, *_dataclasses, *_memory, *_modeling, *_offload, *_operations]  # noqa: PLE0604, RUF100

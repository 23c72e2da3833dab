"""The utility functions, under the path that scripts import. Each lives in its room; this only names them."""

from __future__ import annotations

from .bnb import *  # noqa: F403
from .bnb import __all__ as _bnb
from .constants import *  # noqa: F403
from .constants import __all__ as _constants
from .dataclasses import *  # noqa: F403
from .dataclasses import __all__ as _dataclasses
from .deepspeed import *  # noqa: F403
from .deepspeed import __all__ as _deepspeed
from .environment import *  # noqa: F403
from .environment import __all__ as _environment
from .fsdp_utils import *  # noqa: F403
from .fsdp_utils import __all__ as _fsdp_utils
from .imports import *  # noqa: F403
from .imports import __all__ as _imports
from .megatron_lm import *  # noqa: F403
from .megatron_lm import __all__ as _megatron_lm
from .memory import *  # noqa: F403
from .memory import __all__ as _memory
from .modeling import *  # noqa: F403
from .modeling import __all__ as _modeling
from .offload import *  # noqa: F403
from .offload import __all__ as _offload
from .operations import *  # noqa: F403
from .operations import __all__ as _operations
from .other import *  # noqa: F403
from .other import __all__ as _other
from .random import *  # noqa: F403
from .random import __all__ as _random
from .torch_xla import *  # noqa: F403
from .torch_xla import __all__ as _torch_xla
from .tqdm import *  # noqa: F403
from .tqdm import __all__ as _tqdm
from .versions import *  # noqa: F403
from .versions import __all__ as _versions

__all__ = [
    *_bnb,
    *_constants,
    *_dataclasses,
    *_deepspeed,
    *_environment,
    *_fsdp_utils,
    *_imports,
    *_megatron_lm,
    *_memory,
    *_modeling,
    *_offload,
    *_operations,
    *_other,
    *_random,
    *_torch_xla,
    *_tqdm,
    *_versions,
]  # noqa: PLE0604, RUF100

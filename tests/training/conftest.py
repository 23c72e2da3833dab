"""Every test here starts in a process that knows nothing of itself."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from bigmodel.settings import PREFIXES
from bigmodel.training.accelerator_state import AcceleratorState
from bigmodel.training.environment import LOCAL_RANK_VARIABLES, LOCAL_WORLD_VARIABLES, RANK_VARIABLES, WORLD_VARIABLES
from bigmodel.training.gradient_state import GradientState

LAUNCHER_VARIABLES = (*RANK_VARIABLES, *WORLD_VARIABLES, *LOCAL_RANK_VARIABLES, *LOCAL_WORLD_VARIABLES, "MASTER_ADDR", "MASTER_PORT")
OF_THE_TESTS = ("BIGMODEL_CACHE", "BIGMODEL_SIM_BUILD_DIR")


def _reset() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def fresh_process() -> Iterator[None]:
    """No process state, no launcher's or user's variables; afterwards the environment is as it was."""
    before = dict(os.environ)
    for name in [name for name in before if name in LAUNCHER_VARIABLES or (name.startswith(PREFIXES) and name not in OF_THE_TESTS)]:
        del os.environ[name]
    _reset()
    yield
    _reset()
    os.environ.clear()
    os.environ.update(before)

"""What the fixtures of tests/conftest.py promise."""

from __future__ import annotations

import pytest
import torch

from bigmodel.devices import accelerator_type
from bigmodel.devices import accelerators as visible_accelerators

pytest_plugins = ["pytester"]


def test_there_is_no_accelerator_until_the_test_asks(accelerators) -> None:
    assert not torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator(check_available=True) is None
    assert accelerator_type() is None
    assert visible_accelerators() == []
    with pytest.raises(RuntimeError, match="none is available"):
        torch.ones(1).pin_memory()
    with pytest.raises(RuntimeError, match="0 simulated devices"):
        torch.ones(1, device="sim:0")

    assert accelerators(2, memory=["1MiB", "2MiB"]) == [torch.device("sim:0"), torch.device("sim:1")]
    assert torch.accelerator.is_available()
    assert accelerator_type() == "sim"
    assert visible_accelerators() == [torch.device("sim:0"), torch.device("sim:1")]
    assert [torch.accelerator.get_memory_info(index)[1] for index in range(2)] == [1 << 20, 2 << 20]
    assert torch.ones(1).pin_memory().is_pinned()


def test_execution_device(execution_device: torch.device) -> None:
    assert (torch.ones(3, device=execution_device) * 2).cpu().tolist() == [2, 2, 2]

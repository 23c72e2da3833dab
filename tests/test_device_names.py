"""Devices of a map: any spelling of what is there; what is not there is named, together with what is."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest
import torch

from bigmodel.devices import as_device, as_key
from bigmodel.errors import PlanError

Accelerators = Callable[..., list[torch.device]]


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "xpu:3", "mps", torch.device("cuda:1"), 0, "2"])
def test_a_device_that_this_machine_lacks_is_a_plan_error_that_says_what_it_has(device: object) -> None:
    with pytest.raises(PlanError, match="asked for, but torch sees no accelerator on this machine, only 'cpu'") as caught:
        as_device(device)
    assert repr(device) in str(caught.value)


def test_with_accelerators_of_another_type_or_too_few(accelerators: Accelerators) -> None:
    devices = accelerators(2)
    assert as_device(1) == as_device("sim:1") == as_device(numpy.int64(1)) == devices[1]
    for device in ("cuda", "xpu:3", "mps", 2, "sim:7", torch.device("sim:7")):
        with pytest.raises(PlanError, match=r"there are 2 accelerators of type 'sim' \(0 to 1\), and 'cpu'") as caught:
            as_device(device)
        assert repr(device) in str(caught.value)


def test_integers_of_numpy_are_indices() -> None:
    assert as_key(numpy.int64(3)) == 3
    assert type(as_key(numpy.uint8(3))) is int
    with pytest.raises(PlanError, match="-1 is negative"):
        as_key(numpy.int64(-1))
    with pytest.raises(PlanError, match="not a device"):
        as_key(numpy.bool_(True))

"""Seeds, one state for all processes, and states as plain numbers."""

from __future__ import annotations

import copy
import io
import json
import logging
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from processes import Processes

from bigmodel.errors import TrainingError
from bigmodel.training.random import restore_rng_states, rng_states, set_seed, synchronize_rng_state, synchronize_rng_states
from bigmodel.training.state import PartialState

Draws = tuple[float, float, list[float], list[float]]


@pytest.fixture(autouse=True)
def own_states() -> Iterator[None]:
    before = rng_states()
    yield
    restore_rng_states(before)


def draws() -> Draws:
    """Odd numbers of normal draws, so that the half that a generator keeps for the next call is part of its state."""
    return random.random(), random.gauss(), numpy.random.normal(size=3).tolist(), torch.randn(3).tolist()


def test_a_seed_repeats_every_generator() -> None:
    set_seed(7)
    first = draws()
    assert draws() != first
    set_seed(7)
    assert draws() == first
    set_seed(8)
    assert draws() != first
    set_seed(2**32 + 7)
    assert draws()[2] == first[2], "numpy has the lower 32 bits"


def test_the_seed_of_a_device_is_its_processs(processes: Callable[[int], Processes]) -> None:
    same, own = zip(*processes(2).run(seeded_draws, 5), strict=True)
    assert same[0] == same[1]
    set_seed(5)
    assert own[0] == draws()
    set_seed(6)
    assert own[1] == draws()


def seeded_draws(seed: int) -> tuple[Draws, Draws]:
    set_seed(seed)
    same = draws()
    set_seed(seed, device_specific=True)
    return same, draws()


def test_deterministic_algorithms_are_asked_for() -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    try:
        set_seed(1, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("keep", ["json", "torch"])
def test_states_are_plain_numbers_and_go_on_where_they_were(keep: str) -> None:
    set_seed(3)
    draws()
    states = rng_states()
    assert type(states["torch"]["cpu"][0][0]) is int
    if keep == "json":
        kept = json.loads(json.dumps(states))
    else:
        stream = io.BytesIO()
        torch.save(states, stream)
        stream.seek(0)
        kept = torch.load(stream, weights_only=True)
    assert kept == states
    expected = [draws() for _ in range(3)]
    set_seed(4)
    restore_rng_states(kept)
    assert [draws() for _ in range(3)] == expected


def test_any_of_numpys_generators_is_kept() -> None:
    before = numpy.random.get_bit_generator()
    try:
        for kind in (numpy.random.PCG64, numpy.random.Philox, numpy.random.SFC64):
            numpy.random.set_bit_generator(kind(1))
            numpy.random.normal(size=5)
            states = json.loads(json.dumps(rng_states()))
            expected = numpy.random.normal(size=5).tolist()
            numpy.random.normal(size=5)
            restore_rng_states(states)
            assert numpy.random.normal(size=5).tolist() == expected
    finally:
        numpy.random.set_bit_generator(before)
    with pytest.raises(TrainingError, match="cannot be restored"):
        restore_rng_states(states)


@pytest.mark.parametrize("damage", [
    lambda states: states.pop("numpy"),
    lambda states: states["python"].update(words=[1, 2]),
    lambda states: states["numpy"]["state"].update(key=[1, 2]),
    lambda states: states["torch"].update(cpu=[[1, 2]]),
    lambda states: states["torch"].update(cpu=[[-1]]),
    lambda states: states["torch"].update(cpu=[]),
    lambda states: states["torch"].pop("cpu"),
])  # fmt: skip
def test_damaged_states_change_nothing(damage: Callable[[dict[str, Any]], Any]) -> None:
    set_seed(3)
    states = copy.deepcopy(rng_states())
    set_seed(4)
    expected = draws()
    set_seed(4)
    damage(states)
    with pytest.raises(TrainingError, match="All generators are as they were"):
        restore_rng_states(states)
    assert draws() == expected


def test_a_layout_of_another_time_is_refused() -> None:
    with pytest.raises(TrainingError, match="layout 2; this bigmodel reads layout 1"):
        restore_rng_states({**rng_states(), "layout": 2})
    with pytest.raises(TrainingError, match="layout None"):
        restore_rng_states({})


def test_accelerators_have_states_as_well(accelerators: Any, caplog: pytest.LogCaptureFixture) -> None:
    devices = accelerators(2)
    set_seed(9)
    states = json.loads(json.dumps(rng_states()))
    assert list(states["torch"]) == ["cpu", "sim"]
    assert len(states["torch"]["sim"]) == 2
    expected = [torch.rand(4, device=device).tolist() for device in devices]
    assert [torch.rand(4, device=device).tolist() for device in devices] != expected
    restore_rng_states(states)
    assert [torch.rand(4, device=device).tolist() for device in devices] == expected
    with caplog.at_level(logging.WARNING, "bigmodel.utils.random"):
        restore_rng_states(states)
        assert caplog.text == ""
        accelerators(1)
        torch.rand(1)
        restore_rng_states(states)
    assert "of 2 accelerators (sim), but there is 1 accelerator of type 'sim' (0)" in caplog.text
    assert rng_states()["torch"]["cpu"] == states["torch"]["cpu"]


def test_states_become_the_main_processs(processes: Callable[[int], Processes]) -> None:
    for count in (2, 3):
        results = processes(count).run(synchronized_draws)
        assert len({before for before, _ in results}) == count
        assert {after for _, after in results} == {results[0][1]}


def synchronized_draws() -> tuple[Any, Any]:
    set_seed(1, device_specific=True)
    generator = torch.Generator().manual_seed(PartialState().process_index)

    def both() -> tuple[float, float]:
        return torch.rand(1).item(), torch.rand(1, generator=generator).item()

    before = both()
    synchronize_rng_states(["torch", "generator"], generator)
    synchronize_rng_state()
    return before, both()


def test_a_device_that_is_not_there_has_no_state_to_synchronize(accelerators: Any) -> None:
    with pytest.raises(TrainingError, match="rng_type='cuda': this process computes on cpu; torch sees no accelerator"):
        synchronize_rng_state("cuda")
    with pytest.raises(TrainingError, match="pass `generator`"):
        synchronize_rng_states(["torch", "generator"])
    with pytest.raises(TrainingError, match=r"rng_type is 'gpu'; use one of \['torch', 'cuda'"):
        synchronize_rng_states(["torch", "gpu"])
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    synchronize_rng_states(["torch"])
    assert torch.equal(torch.rand(1), expected), "alone nothing changes"

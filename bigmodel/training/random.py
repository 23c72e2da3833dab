"""Random number generators: seeded, made equal on all processes, kept as plain numbers and restored."""

from __future__ import annotations

import logging
import pickle
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.distributed as dist

from ..devices import accelerator_type, accelerators, machine_text, random_state, set_random_state, use_deterministic_algorithms
from ..errors import TrainingError
from .argument_types import refuse_wrong_arguments
from .enums import RNGType
from .state import PartialState

__all__ = ["known_rng_type", "restore_rng_states", "rng_states", "set_seed", "synchronize_rng_state", "synchronize_rng_states"]

logger = logging.getLogger("bigmodel.utils.random")

LAYOUT = 1
"""Of what `rng_states` returns; counts up when a key changes its meaning."""


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seeds `random`, numpy and torch, on all devices.

    Args:
        seed: from 0; numpy takes its lower 32 bits.
        device_specific: another seed on each process: `seed` and the process's rank.
        deterministic: torch uses algorithms that repeat their results where it has them, which can be slower.
    """
    refuse_wrong_arguments(set_seed, "set_seed", locals())
    if device_specific:
        seed += PartialState().process_index
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        use_deterministic_algorithms()


def synchronize_rng_state(rng_type: RNGType | str | None = None, generator: torch.Generator | None = None) -> None:
    """Every process goes on from the state that a generator has on the main process; each process has to call it.

    Args:
        rng_type: `"torch"` (the CPU's), a type of accelerator (this process's device), or `"generator"`; None: nothing happens.
        generator: for `"generator"`, on the same kind of device in every process.

    Raises:
        TrainingError: an unknown word, an accelerator that is not there, `"generator"` without one.
    """
    if rng_type is None:
        return
    kind = known_rng_type(rng_type)
    process = PartialState()
    if kind == RNGType.GENERATOR:
        if generator is None:
            raise TrainingError("The states of a generator cannot be made equal without one: pass `generator`.")
        generator.set_state(_of_the_main_process(generator.get_state(), process))
        return
    device = torch.device("cpu") if kind == RNGType.TORCH else process.device
    if kind != RNGType.TORCH and device.type != kind:
        raise TrainingError(f"rng_type={str(kind)!r}: this process computes on {device}; {machine_text()}.")
    set_random_state(device, _of_the_main_process(random_state(device), process))


def synchronize_rng_states(rng_types: Iterable[RNGType | str], generator: torch.Generator | None = None) -> None:
    """`synchronize_rng_state` for several kinds; each process has to call it with the same ones."""
    for rng_type in [known_rng_type(rng_type) for rng_type in rng_types]:
        synchronize_rng_state(rng_type, generator)


@dataclass(frozen=True, slots=True)
class CpuStates:
    """States of the default generators of `random`, numpy and torch on the CPU: as these give them, and plain only when asked."""

    torch: torch.Tensor
    python: tuple[Any, ...] | None
    """None, and so for numpy: not taken."""
    numpy: dict[str, Any] | None

    @classmethod
    def now(cls, torch_alone: bool = False) -> CpuStates:
        """The states at this moment; torch's takes a microsecond, the others fifty."""
        if torch_alone:
            return cls(torch.get_rng_state(), None, None)
        return cls(torch.get_rng_state(), random.getstate(), numpy.random.get_state(legacy=False))

    def restore(self) -> None:
        """The generators go on from these states, as far as they were taken."""
        torch.set_rng_state(self.torch)
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None:
            numpy.random.set_state(self.numpy)

    def packed(self) -> bytes:
        """For other processes of this job."""
        return pickle.dumps((self.torch.numpy().tobytes(), self.python, self.numpy))

    @classmethod
    def unpacked(cls, packed: bytes) -> CpuStates:
        """What `packed` gave."""
        state, python, of_numpy = pickle.loads(packed)
        return cls(torch.frombuffer(bytearray(state), dtype=torch.uint8), python, of_numpy)

    def plain(self) -> dict[str, Any]:
        """Numbers, words, None, lists and dictionaries only."""
        python = None
        if self.python is not None:
            version, words, next_gauss = self.python
            python = {"version": version, "words": list(words), "next_gauss": next_gauss}
        return {"python": python, "numpy": _plain(self.numpy), "torch": self.torch.tolist()}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> CpuStates:
        """What `plain` gave."""
        python = plain["python"]
        return cls(
            torch.tensor(plain["torch"], dtype=torch.uint8),
            None if python is None else (python["version"], tuple(python["words"]), python["next_gauss"]),
            plain["numpy"],
        )


def rng_states() -> dict[str, Any]:
    """The states of `random`, numpy's and torch's default generators, on the CPU and on every accelerator of this process.

    Numbers, words, None, lists and dictionaries only: JSON keeps them, no pickle is needed, and no type of any library.
    """
    states = CpuStates.now().plain()
    return {"layout": LAYOUT, **states, "torch": {"cpu": [states["torch"]], **_states_of_accelerators()}}


def restore_rng_states(states: Mapping[str, Any]) -> None:
    """The generators go on from what `rng_states` returned, here or elsewhere; nothing is changed where that cannot be.

    On a machine with other accelerators than where the states were taken those of the CPU are restored, with a warning.

    Raises:
        TrainingError: what `rng_states` never returned, a layout of a later bigmodel, or a state that a library does not take.
    """
    if states.get("layout") != LAYOUT:
        raise TrainingError(f"These random states have layout {states.get('layout')!r}; this bigmodel reads layout {LAYOUT}.")
    before = rng_states()
    try:
        _restore(states)
    except (LookupError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        _restore(before)
        raise TrainingError(f"These random states cannot be restored: {error!r}. All generators are as they were.") from error


def _restore(states: Mapping[str, Any]) -> None:
    kept = dict(states["torch"])
    (cpu,) = kept.pop("cpu")
    CpuStates.from_plain({**states, "torch": cpu}).restore()
    here = accelerators()
    there = [(kind, state) for kind, of_kind in kept.items() for state in of_kind]
    if [kind for kind, _ in there] != [device.type for device in here]:
        logger.warning(
            "The random states are of %d accelerators (%s), but %s: random numbers on accelerators do not go on from there.",
            len(there),
            ", ".join(sorted({kind for kind, _ in there})) or "none",
            machine_text(),
        )
        return
    for device, (_, state) in zip(here, there, strict=True):
        set_random_state(device, torch.tensor(state, dtype=torch.uint8))


def _states_of_accelerators() -> dict[str, list[list[int]]]:
    kind = accelerator_type()
    return {} if kind is None else {kind: [random_state(device).tolist() for device in accelerators()]}


def known_rng_type(rng_type: RNGType | str) -> RNGType:
    """The kind of random generator of that name; `TrainingError` names those there are."""
    if rng_type not in RNGType:
        raise TrainingError(f"rng_type is {str(rng_type)!r}; use one of {RNGType.list()}.")
    return RNGType(rng_type)


def _of_the_main_process(state: torch.Tensor, process: PartialState) -> torch.Tensor:
    if not process.use_distributed:
        return state
    shared = state.to(process.device)
    dist.broadcast(shared, 0)
    return shared.to(state.device)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return value.tolist() if isinstance(value, (numpy.ndarray, numpy.generic)) else value

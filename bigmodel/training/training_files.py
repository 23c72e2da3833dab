"""The files of a training state: weights, optimizers, and small things that are made of plain values."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from ..constants import MODEL_NAME, OPTIMIZER_NAME, SAFE_MODEL_NAME
from ..dispatch import values_of
from ..errors import CheckpointNotFoundError, MatchError, TrainingError
from ..loading import without_aliases, write_safetensors
from ..protocols import TensorSpec
from ..text import kind_text
from .parallel import load
from .sharded_values import held_as

__all__ = [
    "file_name",
    "load_optimizer_file",
    "load_weights_file",
    "named_plainly",
    "read_plain",
    "save_optimizer_file",
    "save_weights_file",
    "write_plain",
]

COMPILED = "_orig_mod."
"""What `torch.compile` puts into the names of a module's tensors."""

WRAPPED = "module."
"""What `DistributedDataParallel` puts before them; other programs save names with it."""


def file_name(stem: str, index: int, suffix: str) -> str:
    """The file of an object of its kind: `model.safetensors` for the first, then `model_1.safetensors`."""
    return f"{stem}{suffix}" if index == 0 else f"{stem}_{index}{suffix}"


def named_plainly(model: nn.Module) -> dict[str, Any]:
    """The state dict of a model, as torch makes it, under the names that its parts have when they are not compiled."""
    state: dict[str, Any] = model.state_dict()
    if not any(COMPILED in name for name in state):
        return state
    plain: Any = OrderedDict((name.replace(COMPILED, ""), value) for name, value in state.items())
    # Modules are named without a dot at the end; what is inside of a compiled one comes after it and is the one that counts.
    versions = getattr(state, "_metadata", {}).items()
    plain._metadata = OrderedDict((f"{name}.".replace(COMPILED, "").removesuffix("."), version) for name, version in versions)
    named: dict[str, Any] = plain
    return named


def save_weights_file(state: Mapping[str, Any], index: int, folder: Path, safe_serialization: bool) -> None:
    """Writes `model.safetensors` (then `model_1.safetensors`), ties once, one tensor in memory at a time; or `pytorch_model.bin`."""
    if safe_serialization:
        strangers = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
        if strangers:
            raise TrainingError(
                f"model {index} has {', '.join(strangers[:10])} in its state dict, which safetensors files cannot hold: they hold tensors. "
                "Use save_state(safe_serialization=False)."
            )
        kept, aliases = without_aliases(state)
        specs = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in kept.items()}
        with open(folder / file_name(SAFE_MODEL_NAME, index, ".safetensors"), "wb", buffering=0) as stream:
            write_safetensors(stream, specs, lambda name: values_of(kept[name]), aliases)
    else:
        values = {name: values_of(value) if isinstance(value, torch.Tensor) else value for name, value in state.items()}
        write_plain(values, folder / file_name(MODEL_NAME, index, ".bin"), f"model {index}")


def load_weights_file(model: nn.Module, index: int, folder: Path, **kwargs: Any) -> None:
    """Copies the values of the model's file into its tensors, of sharded ones this process's part; `kwargs` as in `load_state_dict`.

    Raises `CheckpointNotFoundError` where there is no file, and `MatchError` where its tensors are not the model's.
    """
    file = next(
        (
            file
            for file in (
                folder / file_name(SAFE_MODEL_NAME, index, ".safetensors"),
                folder / file_name(MODEL_NAME, index, ".bin"),
            )
            if file.exists()
        ),
        None,
    )
    if file is None:
        raise CheckpointNotFoundError(
            f"{folder}: there is no {file_name(SAFE_MODEL_NAME, index, '.safetensors')} for model {index}, {kind_text(model)}. "
            "Prepare as many models as were saved, in the same order."
        )
    held = model.state_dict(keep_vars=True)
    actual = {name.replace(COMPILED, ""): name for name in held}
    state = {}
    for name, value in _read_weights(file).items():
        plain = name.replace(COMPILED, "")
        if plain not in actual and plain.startswith(WRAPPED):
            plain = plain.removeprefix(WRAPPED)
        name = actual.get(plain, plain)
        state[name] = held_as(held.get(name), value)
    try:
        model.load_state_dict(state, **kwargs)
    except RuntimeError as error:
        raise MatchError(f"{file} does not fill model {index}: {error}") from error


def _read_weights(file: Path) -> dict[str, Any]:
    if file.suffix != ".safetensors":
        whole: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        return whole
    state: dict[str, Any] = load_file(file)
    with safe_open(file, "pt") as opened:
        metadata: dict[str, str] = opened.metadata() or {}
    # Ties are in the file once; the metadata says under which name.
    return state | {alias: state[name] for alias, name in metadata.items() if name in state and alias not in state}


def save_optimizer_file(optimizer: torch.optim.Optimizer, index: int, folder: Path) -> None:
    """Writes `optimizer.bin` (`optimizer_1.bin`, …): the state dict."""
    write_plain(optimizer.state_dict(), folder / file_name(OPTIMIZER_NAME, index, ".bin"), f"optimizer {index}")


def load_optimizer_file(optimizer: torch.optim.Optimizer, index: int, folder: Path, map_location: Any) -> None:
    """Fills an optimizer from its file, read to `map_location` first; its state ends where its parameters are, sharded as they are."""
    saved = read_plain(folder / file_name(OPTIMIZER_NAME, index, ".bin"), f"optimizer {index}", map_location)
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # torch itself says which groups do not fit.
    for number, parameter in zip(numbers, parameters, strict=False):
        values = saved["state"].get(number)
        if values is not None:
            saved["state"][number] = {name: held_as(parameter, value) for name, value in values.items()}
    optimizer.load_state_dict(saved)


def write_plain(state: Any, file: Path, what: str) -> None:
    """`torch.save`, and the certainty that the file can be read without running code from it. Raises `TrainingError` naming `what`."""
    torch.save(state, file)
    try:
        load(file, map_location="cpu", mmap=True)  # tensors stay in the file
    except Exception as error:
        raise TrainingError(
            f"The state of {what} holds objects that cannot be read back safely; its state_dict may hold tensors, numbers, strings, and "
            f"lists, tuples and dicts of such. ({str(error).splitlines()[0]})"
        ) from error


def read_plain(file: Path, what: str, map_location: Any = "cpu") -> Any:
    """What `write_plain` wrote. Raises `CheckpointNotFoundError`, or `TrainingError` for a file that would run code."""
    if not file.exists():
        raise CheckpointNotFoundError(
            f"{file.parent}: there is no {file.name} for {what}. Prepare and register as many objects as were saved, in the same order."
        )
    try:
        return load(file, map_location=map_location)
    except Exception as error:
        raise TrainingError(f"{file} ({what}) cannot be read: {str(error).splitlines()[0]}") from error

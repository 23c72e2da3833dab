"""Files of sharded models and optimizers: folders of `torch.distributed.checkpoint`, or the files of a job that is not sharded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from ...constants import OPTIMIZER_NAME
from ...errors import CheckpointError, MatchError, TrainingError
from ...loading import save_model as write_model
from ...planning import convert_file_size_to_int
from ..checkpoint_folder import together
from ..sharded_values import whole
from ..training_files import file_name, write_plain

__all__ = [
    "Shapes",
    "load_optimizer_parts",
    "load_parts",
    "parts_folder",
    "read_parts",
    "save_optimizer_parts",
    "save_optimizer_whole",
    "save_parts",
    "save_whole_weights",
    "write_parts",
]

FOLDERS: Final = {"model": "pytorch_model_fsdp", "optimizer": "optimizer"}
"""Names that other programs give these folders; inside, everything is below `"model"` or `"optimizer"`."""


def parts_folder(kind: str, index: int, folder: Path) -> Path:
    """Where the parts of the `"model"` or `"optimizer"` of that index are."""
    return folder / f"{FOLDERS[kind]}_{index}"


def save_parts(state: Mapping[str, Any], index: int, folder: Path) -> None:
    """Every process writes its part of a model's state dict."""
    write_parts({"model": dict(state)}, parts_folder("model", index, folder))


def load_parts(model: nn.Module, index: int, folder: Path, **kwargs: Any) -> None:
    """Fills a model, sharded in whatever way, from the parts that any number of processes wrote; `kwargs` as in `load_state_dict`."""
    state = {"model": dict(model.state_dict())}
    read_parts(state, parts_folder("model", index, folder), bool(kwargs.get("strict", True)))
    try:
        model.load_state_dict(state["model"], **kwargs)
    except RuntimeError as error:
        raise MatchError(f"{parts_folder('model', index, folder)} does not fill model {index}: {error}") from error


def save_optimizer_parts(models: Sequence[nn.Module], optimizer: torch.optim.Optimizer, index: int, folder: Path) -> None:
    """Every process writes its part of an optimizer's states, under the names of their parameters."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    state = get_optimizer_state_dict(_trained_by(optimizer, models), _inner(optimizer))
    write_parts({"optimizer": state}, parts_folder("optimizer", index, folder))


def load_optimizer_parts(models: Sequence[nn.Module], optimizer: torch.optim.Optimizer, index: int, folder: Path) -> None:
    """Fills an optimizer from the parts that any number of processes wrote."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    model = _trained_by(optimizer, models)
    state = {"optimizer": get_optimizer_state_dict(model, _inner(optimizer))}
    read_parts(state, parts_folder("optimizer", index, folder), True)
    set_optimizer_state_dict(model, _inner(optimizer), state["optimizer"])


def save_optimizer_whole(optimizer: torch.optim.Optimizer, index: int, folder: Path, writes: bool) -> None:
    """Writes the file of a job that is not sharded, `optimizer.bin`, in processes that write; all gather the states."""
    saved = optimizer.state_dict()
    states: dict[Any, dict[str, Any]] = {}
    for number, values in saved["state"].items():
        for name, value in values.items():
            full = whole(value).to("cpu") if isinstance(value, torch.Tensor) else value
            if writes:
                states.setdefault(number, {})[name] = full
    if writes:
        write_plain({**saved, "state": states}, folder / file_name(OPTIMIZER_NAME, index, ".bin"), f"optimizer {index}")


def save_whole_weights(
    state: Mapping[str, Any],
    gathered: Callable[[str], torch.Tensor],
    folder: Path,
    max_shard_size: int | str,
    safe_serialization: bool,
    writes: bool,
) -> None:
    """`bigmodel.save_model` of a sharded model in processes that write: all gather the tensor that is written next.

    Args:
        state: a state dict, of whose tensors shape, dtype and identity count.
        gathered: gives all values of a tensor by its name; all processes call it together.

    Raises its errors where they happen, and `TrainingError`, naming the process, in the others.
    """
    names = list(state)
    numbers = {name: number for number, name in enumerate(names)}
    wanted: list[int | None] = [0]  # process 0 says which tensor, and None at the end

    def next_one() -> torch.Tensor | None:
        dist.broadcast_object_list(wanted, src=0)
        return None if wanted[0] is None else gathered(names[wanted[0]])

    def fetch(name: str) -> torch.Tensor:
        number = wanted[0] = numbers[name]
        values = next_one()
        if values is None or wanted[0] != number:
            raise CheckpointError(f"{name!r} does not come: process 0 has failed to write.")
        return values

    with together("save_model"):
        try:
            if writes:
                write_model(Shapes(state), folder, convert_file_size_to_int(max_shard_size), safe_serialization, fetch=fetch)
        finally:
            if dist.get_rank() == 0:
                wanted[0] = None
                next_one()
            while wanted[0] is not None:
                next_one()


class Shapes(nn.Module):
    """Whole tensors in the place of parts, without values: what a file of the model is laid out by."""

    def __init__(self, state: Mapping[str, Any]):
        super().__init__()
        made: dict[int, Any] = {}  # ties stay ties
        self._shapes = {
            name: made.setdefault(id(value), torch.empty(value.shape, dtype=value.dtype, device="meta"))
            if isinstance(value, torch.Tensor)
            else value
            for name, value in state.items()
        }

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The tensors without values."""
        return self._shapes


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    return getattr(optimizer, "optimizer", optimizer)


def _trained_by(optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> nn.Module:
    """The model whose parameters the optimizer has, or one that holds several. Raises `TrainingError` for parameters of none."""
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found = [model for model in models if not wanted.isdisjoint(map(id, model.parameters()))]
    lacking = wanted - {id(parameter) for model in found for parameter in model.parameters()}
    if lacking or not found:
        raise TrainingError(
            f"The optimizer has {len(lacking)} parameters that no prepared model has; state_dict_type='FULL_STATE_DICT' saves them."
        )
    return found[0] if len(found) == 1 else nn.ModuleList(found)


def write_parts(state: dict[str, Any], folder: Path) -> None:
    """Every process writes its part of what is in `state`; tensors that are not sharded are written once."""
    from torch.distributed.checkpoint.state_dict_saver import save

    save(state, checkpoint_id=str(folder))


def read_parts(state: dict[str, Any], folder: Path, strict: bool) -> None:
    """Fills the tensors of `state` in place, sharded in whatever way, and replaces its other values. Raises `MatchError`."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        load(state, checkpoint_id=str(folder), planner=DefaultLoadPlanner(allow_partial_load=not strict))
    except Exception as error:  # what went wrong is in the processes' own words
        raise MatchError(f"{folder} does not fill what is prepared: {str(error).splitlines()[-1]}") from error

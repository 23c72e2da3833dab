"""Offload folders: weights as raw files beside an `index.json`, or the index alone, pointing into checkpoints.

The index is a JSON object, weight name → what it is. `{"dtype": "float32", "shape": [2, 3]}` stands for the raw file `<name>.dat`
(row-major, the machine's byte order); `{"safetensors_file": …, "weight_name": …, "dtype": …}` for one of a safetensors file (as
transformers writes it); `{"torch_file": …, "weight_name": …, "dtype": …}` for one in a file of `torch.save`.
bigmodel writes whole paths there.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..atomic import folder_to_write, write_atomically
from ..constants import OFFLOAD_INDEX_NAME
from ..devices import as_device
from ..errors import CheckpointError, CheckpointNotFoundError
from .checkpoint import Checkpoint
from .dtypes import as_dtype
from .host_memory import empty_host_tensor
from .keys import Whole
from .location import working_folder
from .reader import Reader
from .transfer import lower

__all__ = [
    "OffloadedWeightsLoader",
    "PrefixedDataset",
    "extract_submodules_state_dict",
    "load_offloaded_weight",
    "offload_state_dict",
    "offload_weight",
    "read_offload_index",
    "save_offload_index",
]

Index = dict[str, dict[str, Any]]
T = TypeVar("T")


def _data_file(folder: str | Path, name: str) -> Path:
    """The raw file of a weight. Raises `CheckpointError` for a name that would lead out of the folder."""
    if not name or name.startswith(".") or any(mark in name for mark in ("/", "\\", "\0")):
        raise CheckpointError(f"{folder}: {name!r} is not the name of a weight: it could lead out of the folder.")
    return Path(folder) / f"{name}.dat"


def offload_weight(weight: torch.Tensor, weight_name: str, offload_folder: str | Path, index: Index | None = None) -> Index | None:
    """Writes a tensor (any device, any layout in memory) to `<offload_folder>/<weight_name>.dat`, atomically.

    Returns `index` with the weight's entry added (None stays None).
    """
    file = _data_file(offload_folder, weight_name)
    data = weight.detach().to("cpu").contiguous()
    write_atomically(file, data.reshape(-1).view(torch.uint8).numpy().data if data.numel() else b"")
    if index is not None:
        index[weight_name] = {"dtype": str(weight.dtype).removeprefix("torch."), "shape": list(weight.shape)}
    return index


def load_offloaded_weight(weight_file: str | Path, weight_info: Mapping[str, Any]) -> torch.Tensor:
    """The tensor in a raw file, in memory of its own. Raises `CheckpointError` when the file has not the size that `weight_info` tells."""
    tensor = empty_host_tensor(tuple(weight_info["shape"]), as_dtype(weight_info["dtype"]))
    needed = tensor.numel() * tensor.dtype.itemsize
    if not needed:
        return tensor
    try:
        found = os.stat(weight_file).st_size
        if found != needed:
            raise CheckpointError(f"{weight_file}: expected {needed} bytes, found {found}. Delete the folder and offload again.")
        with open(weight_file, "rb", buffering=0) as stream:
            memory = tensor.reshape(-1).view(torch.uint8).numpy().data
            while memory:
                memory = memory[stream.readinto(memory) or len(memory) :]
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"{weight_file}: the offloaded weight is not there. Delete the folder and offload again.") from error
    return tensor


def read_offload_index(folder: str | Path) -> Index:
    """The index of an offload folder. Raises `CheckpointNotFoundError` where there is none, `CheckpointError` for one that is damaged."""
    file = Path(folder) / OFFLOAD_INDEX_NAME
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"{folder}: no {OFFLOAD_INDEX_NAME} in it, so it is no offload folder.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not valid JSON ({str(error)[:200]}). Delete the folder and offload again.") from error
    if not isinstance(index, dict) or not all(isinstance(info, dict) for info in index.values()):
        raise CheckpointError(f"{file}: not an index: it should map weight names to objects. Delete the folder and offload again.")
    return index


def save_offload_index(index: Mapping[str, Mapping[str, Any]] | None, offload_folder: str | Path) -> None:
    """Adds `index` to the folder's `index.json`; new entries win. Nothing happens without entries."""
    if not index:
        return
    file = Path(offload_folder) / OFFLOAD_INDEX_NAME
    merged = (read_offload_index(offload_folder) if file.is_file() else {}) | {name: dict(info) for name, info in index.items()}
    write_atomically(file, json.dumps(merged, indent=2).encode())


def offload_state_dict(save_dir: str | Path, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Writes all tensors to the folder `save_dir` (made if need be), and its index last.

    Raises `CheckpointError`, naming the folder, when it cannot be written; no new file stays then.
    """
    index: Index = {}
    files = [_data_file(save_dir, name).name for name in state_dict]
    with folder_to_write(Path(save_dir), [*files, OFFLOAD_INDEX_NAME]):
        for name, weight in state_dict.items():
            offload_weight(weight, name, save_dir, index)
        save_offload_index(index, save_dir)


class PrefixedDataset(Mapping[str, T]):
    """The items of `dataset` whose keys start with `prefix`, looked up by the rest of the key.

    Iteration gives the full keys, as existing scripts expect; the length is the number of these keys.
    """

    def __init__(self, dataset: Mapping[str, T], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> T:
        return self.dataset[f"{self.prefix}{key}"]

    def __contains__(self, key: object) -> bool:
        return f"{self.prefix}{key}" in self.dataset

    def __iter__(self) -> Iterator[str]:
        return (key for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class OffloadedWeightsLoader(Mapping[str, torch.Tensor]):
    """Weights by name: those of `state_dict`, then those of an offload folder or an index. Safe to be used by several threads.

    Args:
        state_dict: tensors that are in memory.
        save_folder: the folder of the raw files, and of `index.json` unless `index` is given.
        index: what an `index.json` holds. Relative files in it belong to the folder that the program runs in; those in an `index.json`
            to its folder or, where that has none of this name, to the folder that the program runs in.
        device: where tensors of safetensors and torch files go; the CPU by default.

    Every tensor that is read lies in memory of its own. Raises ValueError when nothing is given, and `CheckpointError`, when it is read,
    for a relative file in an `index.json` that leads out of the folder.
    """

    def __init__(
        self,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        save_folder: str | Path | None = None,
        index: Mapping[str, Mapping[str, Any]] | None = None,
        device: int | str | torch.device | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ValueError("Nothing to load weights from: give a `state_dict`, a `save_folder` or an `index`.")
        self.state_dict = {} if state_dict is None else state_dict
        self.save_folder = save_folder
        # The program may go elsewhere before it reads.
        self._here = working_folder()
        self._folder = None if save_folder is None else self._here / save_folder
        self._names_beside = index is None
        self.index: Mapping[str, Mapping[str, Any]] = (
            index if index is not None else {} if save_folder is None else read_offload_index(save_folder)
        )
        self.all_keys = [*self.state_dict, *(key for key in self.index if key not in self.state_dict)]
        self.device = device
        self._checkpoints: dict[Path | str, tuple[Checkpoint, Reader]] = {}
        self._lock = threading.Lock()

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        info = self.index[key]
        file = info.get("safetensors_file") or info.get("torch_file")
        if file is None:
            if self._folder is None:
                raise CheckpointError(f"{key!r} rests in a raw file, but no `save_folder` was given.")
            return load_offloaded_weight(_data_file(self._folder, key), info)
        return self._from_checkpoint(self._place(file), info.get("weight_name", key), info.get("dtype"))

    def _place(self, file: str) -> Path | str:
        """Where a file lies that the index names."""
        path = Path(file)
        if "://" in file:
            return file
        if self._folder is None or not self._names_beside or path.is_absolute():
            return self._here / path
        if ".." in path.parts:
            raise CheckpointError(
                f"{self._folder / OFFLOAD_INDEX_NAME}: names the file {file!r} outside its folder. Write its whole path there."
            )
        beside = self._folder / path
        # Other libraries write the names that they were given, which were looked for where the program ran.
        return self._here / path if (self._here / path).is_file() and not beside.is_file() else beside

    def _from_checkpoint(self, file: Path | str, name: str, dtype: str | None) -> torch.Tensor:
        with self._lock:
            if file not in self._checkpoints:
                checkpoint = Checkpoint.open(file)
                self._checkpoints[file] = checkpoint, Reader(checkpoint.identities)
            checkpoint, reader = self._checkpoints[file]
        if name not in checkpoint.entries:
            raise CheckpointError(f"{file}: the offload index says that it holds {name!r}, but it does not.")
        entry = checkpoint.entries[name]
        wanted = entry.dtype if dtype is None else as_dtype(dtype)
        tensor = empty_host_tensor(entry.shape, wanted)
        reader.read([(lower(Whole(name), checkpoint.entries, name, wanted), tensor)])
        return tensor if self.device is None else tensor.to(as_device(self.device))

    def __contains__(self, key: object) -> bool:
        return key in self.state_dict or key in self.index

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_lock", "_checkpoints")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock(), _checkpoints={})


def extract_submodules_state_dict(state_dict: Mapping[str, T], submodule_names: Collection[str]) -> dict[str, T]:
    """The items of `state_dict` that are one of the modules' (or tensors') names or lie below one; `""` stands for everything."""
    return {
        key: value
        for key, value in state_dict.items()
        if any(not name or key == name or key.startswith(name + ".") for name in submodule_names)
    }

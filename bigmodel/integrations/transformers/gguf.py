"""GGUF files as checkpoints of transformers models: their configuration, names and order of rows, by transformers' own tables.

transformers has no table of what its code does to each tensor: it has functions that change arrays. They are tried on arrays of row
numbers, which shows what they move, so that bytes can be read straight into place; only what they compute is computed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from ...errors import CheckpointError, MatchError, MissingPackageError
from ...loading import Checkpoint, Computed, Concatenate, Entry, Slice, Source, Whole
from ...loading.location import CheckpointFile, RemoteFile
from ...loading.remote import header_file
from ...protocols import TensorSpec
from ...text import kind_text
from .package import transformers_module

__all__ = ["gguf_sources", "is_gguf", "local_header", "single_gguf"]

REORDERED_BYTES: Final = 16 << 20
"""Of rows that are put in another order at once, as float32."""

Array = npt.NDArray[Any]


def is_gguf(entries: Mapping[str, Entry]) -> bool:
    """Whether a checkpoint's entries lie in GGUF files."""
    return any(entry.file.suffix == ".gguf" for entry in entries.values())


def single_gguf(path: str | os.PathLike[str]) -> Path | None:
    """The GGUF file that also has the configuration: `path` itself, or the only one in a folder without `config.json`."""
    place = Path(path)
    if place.suffix == ".gguf" and place.is_file():
        return place
    if not place.is_dir() or (place / "config.json").exists():
        return None
    found = sorted(place.glob("*.gguf"))
    return found[0] if len(found) == 1 else None


def gguf_sources(model: Any, entries: Mapping[str, Entry], targets: Mapping[str, TensorSpec]) -> tuple[dict[str, Source], list[str]]:
    """What fills each tensor of a transformers model, and the names in the file that it has no use for.

    Raises:
        MatchError: transformers knows no names for such a model, or does to a tensor what cannot be followed. CheckpointError:
        transformers cannot read the file. MissingPackageError: the package gguf is not installed.
    """
    functions = transformers_module("modeling_gguf_pytorch_utils")
    file = _only_file(entries)
    try:
        with local_header(entries) as here:
            config = functions.load_gguf_checkpoint(os.fspath(here))["config"]
            architecture = Checkpoint.open(here).metadata.get("general.architecture", "")
        processor = functions.TENSOR_PROCESSORS.get(architecture, functions.TensorProcessor)(config=config)
        names: dict[str, str] = functions.get_gguf_hf_weights_map(model, processor)
    except ImportError as error:
        raise MissingPackageError(f"{file}: reading a GGUF file into a transformers model needs the package gguf: {error}") from error
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{file}: transformers cannot read this GGUF file: {error}") from error
    # `AttributeError`: a transformers in which these functions, which it keeps for itself, are gone or changed.
    except (NotImplementedError, AttributeError, TypeError) as error:
        version = transformers_module().__version__
        raise MatchError(
            f"{file}: transformers {version} has no names for the GGUF tensors of {kind_text(model)}: {error!r}. "
            "Convert the file to safetensors with transformers first."
        ) from error

    found: dict[str, Source] = {}
    joined: dict[str, list[tuple[int, Source]]] = {}
    unexpected = []
    for name, entry in entries.items():
        filled = _filled(processor, name, entry, names)
        if not any(target in targets for target in filled):
            unexpected.append(name)
        for target, (place, source) in filled.items():
            joined.setdefault(target, []).append((place, source))
    for target, parts in joined.items():
        if target in targets:
            ordered = tuple(source for _, source in sorted(parts, key=lambda part: part[0]))
            found[target] = ordered[0] if len(ordered) == 1 else Concatenate(ordered, 1)
    return found, unexpected


@contextlib.contextmanager
def local_header(entries: Mapping[str, Entry]) -> Iterator[Path]:
    """The GGUF file with these entries, or one on this machine that begins as it does, to be asked for its configuration and names.

    Raises `MatchError` for several files.
    """
    file = _only_file(entries)
    if isinstance(file, RemoteFile):
        with header_file(file, min(entry.offset for entry in entries.values())) as begun:
            yield begun
    else:
        yield file


def _only_file(entries: Mapping[str, Entry]) -> CheckpointFile:
    files = {entry.file for entry in entries.values()}
    first = min(files, key=str)
    if len(files) > 1:
        raise MatchError(f"{first}: transformers reads models from one GGUF file, not from {len(files)}. Merge them (gguf-split --merge).")
    return first


def _filled(processor: Any, name: str, entry: Entry, names: Mapping[str, str]) -> dict[str, tuple[int, Source]]:
    """Which tensors of the model an entry fills, from which place in the second dimension on, and how."""
    if name not in names and _stem(name) not in names:
        return {}
    numbers = np.arange(1.0, 1.0 + int(np.prod(entry.shape[:-1] if len(entry.shape) > 1 else entry.shape)))
    probe = numbers.reshape(*entry.shape[:-1], 1) if len(entry.shape) > 1 else numbers
    taken: dict[str, torch.Tensor] = {}
    try:
        result, renamed = _process(processor, probe, name, names, taken)
    # Code that needs the length of rows fails on rows of one number, in any way: it is shown the whole shape below.
    except Exception:
        result, renamed = np.empty(0), name
    if renamed is None:
        return {target: (_place(target, value.numpy(), probe, name), Whole(name)) for target, value in taken.items()}
    target = names.get(renamed)
    if target is None:
        return {}
    if result.shape == probe.shape and np.array_equal(result, probe):
        return {target: (0, Whole(name))}
    if result.shape == probe.shape and probe.ndim <= 2 and np.array_equal(np.sort(result.ravel()), probe.ravel()):
        order = torch.from_numpy(result.ravel().astype(np.int64) - 1)
        return {target: (0, _reordered(name, entry, order))}
    return {target: (0, _computed(processor, name, entry, names))}


def _stem(name: str) -> str:
    """The name under which transformers' table keeps stacked experts."""
    return name.removesuffix(".weight")


def _process(
    processor: Any, weights: Array, name: str, names: Mapping[str, str], taken: dict[str, torch.Tensor]
) -> tuple[Array, str | None]:
    """What transformers makes of an array, under which name; without a name, it has put it among `taken`."""
    made = processor.process(weights=weights, name=name, tensor_key_mapping=dict(names), parsed_parameters={"tensors": taken})
    return made.weights, made.name


def _place(target: str, whole: Array, probe: Array, name: str) -> int:
    """Where in the second dimension of a tensor an entry lies, whose rows are numbered from 1. Raises where they do not lie together."""
    if whole.shape == probe.shape and np.array_equal(whole, probe):
        return 0
    if whole.ndim == probe.ndim == 3:
        columns = np.flatnonzero(whole.any(axis=(0, 2)))
        start = int(columns[0]) if columns.size else 0
        if np.array_equal(whole[:, start : start + probe.shape[1]], probe) and columns.size == probe.shape[1]:
            return start
    raise MatchError(
        f"{name!r} fills {target!r} in a way that is known to transformers only. Convert the file to safetensors with transformers first."
    )


def _reordered(name: str, entry: Entry, order: torch.Tensor) -> Source:
    """An entry with its rows in another order, in parts as small as the order allows."""
    reach = torch.cummax(order, 0).values
    ends = (torch.nonzero(reach == torch.arange(len(order))).flatten() + 1).tolist()
    row_bytes = 4 * int(np.prod(entry.shape[1:]))
    parts: list[Source] = []
    start = 0
    for end, following in zip(ends, [*ends[1:], None], strict=True):
        if following is None or (following - start) * row_bytes > REORDERED_BYTES:
            function = partial(_in_order, order[start:end] - start)
            shape = (end - start, *entry.shape[1:])
            parts.append(Computed((Slice(Whole(name), 0, start, end - start),), function, shape, entry.dtype))
            start = end
    return parts[0] if len(parts) == 1 else Concatenate(tuple(parts), 0)


def _in_order(order: torch.Tensor, inputs: list[torch.Tensor]) -> torch.Tensor:
    return inputs[0][order]


def _computed(processor: Any, name: str, entry: Entry, names: Mapping[str, str]) -> Source:
    """An entry that transformers computes from, as float32."""
    function: Callable[[list[torch.Tensor]], torch.Tensor] = partial(_processed, processor, name, dict(names))
    try:
        shape = tuple(_process(processor, np.broadcast_to(np.float32(-1), entry.shape), name, names, {})[0].shape)
    # What transformers' code raises for a tensor of another shape than it expects is of any type.
    except Exception as error:
        raise MatchError(f"{name!r} of shape {list(entry.shape)}: transformers cannot convert it: {error!r}") from error
    return Computed((Whole(name),), function, shape, torch.float32)


def _processed(processor: Any, name: str, names: Mapping[str, str], inputs: list[torch.Tensor]) -> torch.Tensor:
    return torch.from_numpy(np.array(_process(processor, inputs[0].to(torch.float32).numpy(), name, names, {})[0]))

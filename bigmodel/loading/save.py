"""Saving a model shard by shard, tensor by tensor, without ever holding it: safetensors files and their index."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy

from ..atomic import folder_to_write, write_all
from ..constants import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_PATTERN_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_PATTERN_NAME
from ..errors import CheckpointError
from ..protocols import TensorSpec
from ..text import kind_text
from .checksum import checksum, noted, room_for
from .extra_state import JSON_TEXT, is_extra_state, text_tensor
from .formats.safetensors import lay_out
from .formats.torch_zip import TorchZipFormat
from .publish import published_together
from .tensor_file import byte_parts

__all__ = ["Fetch", "NoValuesError", "save_model", "without_aliases", "write_safetensors"]

Fetch = Callable[[str], torch.Tensor]
"""Name in the state dict → its values, on any device."""

DEFAULT_SHARD_BYTES: Final = 5 * 10**9


class NoValuesError(CheckpointError, RuntimeError):
    """Tensors on meta that should be saved; a RuntimeError for the scripts that expect torch's."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(
            f"{len(names)} tensors have no values to save (they are on meta): {', '.join(names[:10])}. "
            "Load the model first (load_checkpoint_and_dispatch), and save an offloaded one through bigmodel's own functions, which fetch "
            "its weights."
        )


def save_model(
    model: nn.Module,
    folder: str | Path,
    max_shard_size: int = DEFAULT_SHARD_BYTES,
    safe_serialization: bool = True,
    metadata: Mapping[str, str] | None = None,
    *,
    fetch: Fetch | None = None,
    checksums: bool = False,
) -> list[Path]:
    """Writes the state dict of `model` to `folder`: `model.safetensors`, or numbered shards and `model.safetensors.index.json`.

    Args:
        max_shard_size: bytes of tensors in a shard; a larger tensor has a shard of its own.
        safe_serialization: False writes torch's format (`pytorch_model.bin`).
        metadata: added to the files' own.
        fetch: gives the values of a name in the state dict, for models whose weights are elsewhere; by default the tensor itself.
        checksums: whether safetensors files say in their metadata what the sum of each tensor's bytes is, so that loading sees damage.

    Names of one tensor (ties, and views of the same memory) are saved once; the files' metadata maps the other names to the one that is
    there, as `safetensors.torch.save_model` does, and loading fills them from it. Extra states of modules are saved too, see `extra_state`.
    In memory is one tensor at a time. All files appear together when they are complete, in the place of what was saved there before, in
    either format; an error or Ctrl-C leaves the folder as it was, and a process killed meanwhile nothing that loads as a mixture of both.

    Returns the files. Raises `CheckpointError` for tensors without values (on meta), for what is no tensor (and no extra state of plain
    values), for values that `fetch` gives with another shape or dtype, for metadata that are not text, for a folder that cannot be written
    (a file in the way, a full disk), and for one that holds other files which would be loaded instead.
    """
    if "://" in str(folder):
        raise CheckpointError(f"{folder}: models are saved into a folder on this machine. Save there, and upload the files.")
    for key, value in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise CheckpointError(
                f"metadata {{{key!r}: {value!r}}}: files hold text under names alone. Use str({key!r}) and str({value!r})."
            )
    folder = Path(folder)
    tensors, texts = _tensors(model, safe_serialization)
    _check_plain(tensors)
    kept, aliases = without_aliases(tensors)
    if fetch is None:
        empty = [name for name in kept if kept[name].device.type == "meta"]
        if empty:
            raise NoValuesError(empty)
        fetch = tensors.__getitem__
    fetch = partial(_with_texts, texts, fetch)
    specs = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in kept.items()}
    shards = _shards(specs, max_shard_size)
    pattern, index_name = (
        (SAFE_WEIGHTS_PATTERN_NAME, SAFE_WEIGHTS_INDEX_NAME) if safe_serialization else (WEIGHTS_PATTERN_NAME, WEIGHTS_INDEX_NAME)
    )
    names = [pattern.format(suffix="" if len(shards) == 1 else f"-{n:05d}-of-{len(shards):05d}") for n in range(1, len(shards) + 1)]
    with folder_to_write(folder), published_together(folder, names if len(names) == 1 else [*names, index_name]) as temporary:
        for name, shard in zip(names, shards, strict=True):
            own = {alias: first for alias, first in aliases.items() if first in shard}
            own |= dict.fromkeys((each for each in texts if each in shard), JSON_TEXT)
            if safe_serialization:
                with open(temporary / name, "wb", buffering=0) as stream:
                    write_safetensors(stream, shard, fetch, {**(metadata or {}), **own}, checksums=checksums)
            else:
                _write_torch(temporary / name, shard, fetch, own)
        if len(shards) > 1:
            weight_map = {each: name for name, shard in zip(names, shards, strict=True) for each in shard}
            total = sum(_nbytes(spec) for spec in specs.values())
            index = {"metadata": {"total_size": total, **(metadata or {})}, "weight_map": weight_map}
            (temporary / index_name).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return [folder / name for name in names]


def _nbytes(spec: TensorSpec) -> int:
    return torch.Size(spec.shape).numel() * spec.dtype.itemsize


def _tensors(model: nn.Module, safe_serialization: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The state dict, and those of its tensors that hold plain values as text. Raises `CheckpointError` for what cannot be saved."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    texts = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            continue
        problem = f"{name!r} in the state dict is {kind_text(value)}, not a tensor; it cannot be saved here."
        if not is_extra_state(name):
            raise CheckpointError(problem)
        text = text_tensor(value)
        if text is None:
            raise CheckpointError(
                f"{problem} Let get_extra_state give a tensor, or None, numbers, strings, lists, and dicts of these under names."
            )
        if not safe_serialization:
            raise CheckpointError(f"{problem} Files of safetensors hold it as text: use safe_serialization=True.")
        texts[name] = text
    return state | texts, texts


def _check_plain(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises `CheckpointError`, naming them, for tensors that are not one block of numbers, which files hold."""
    for name, tensor in tensors.items():
        if is_lazy(tensor):
            raise CheckpointError(f"{name!r} has no shape yet: it belongs to a lazy module. Run a forward first, which gives it one.")
        layout = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        if layout != "strided":
            raise CheckpointError(
                f"{name!r} is a {layout.removeprefix('_')} tensor; files hold dense ones alone. Make it one (to_dense, dequantize, "
                "to_padded_tensor), or leave it out of the state dict (persistent=False)."
            )


def _with_texts(texts: Mapping[str, torch.Tensor], fetch: Fetch, name: str) -> torch.Tensor:
    return texts[name] if name in texts else fetch(name)


def without_aliases(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors that have to be saved, and the names that stand for the very same bytes → the name that is saved."""
    kept: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, tensor in tensors.items():
        # Empty and meta tensors have no address to be compared by; the same object is the same tensor anywhere.
        has_address = tensor.device.type != "meta" and tensor.numel() > 0
        reading = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()) if has_address else ()
        key = (tensor.device, tensor.data_ptr(), *reading) if has_address else id(tensor)
        known = first.setdefault(key, name)
        if known == name:
            kept[name] = tensor
        else:
            aliases[name] = known
    return kept, aliases


def _shards(specs: Mapping[str, TensorSpec], limit: int) -> list[dict[str, TensorSpec]]:
    shards: list[dict[str, TensorSpec]] = [{}]
    size = 0
    for name, spec in specs.items():
        if shards[-1] and size + _nbytes(spec) > limit:
            shards.append({})
            size = 0
        shards[-1][name] = spec
        size += _nbytes(spec)
    return shards


def _fetched(fetch: Fetch, name: str, spec: TensorSpec) -> torch.Tensor:
    tensor = fetch(name).detach()
    if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype or tensor.device.type == "meta":
        raise CheckpointError(
            f"{name!r} should be saved with shape {list(spec.shape)} and {spec.dtype}; "
            f"its values came with {list(tensor.shape)}, {tensor.dtype}, on {tensor.device}."
        )
    return tensor.resolve_conj().resolve_neg()


def write_safetensors(
    stream: BinaryIO, specs: Mapping[str, TensorSpec], fetch: Fetch, metadata: Mapping[str, str], *, checksums: bool = False
) -> None:
    """Writes a whole safetensors file of PyTorch's to `stream`, from one end to the other, with one tensor in memory at a time.

    With `checksums` (of a stream that can seek) the header is written again at the end.

    Raises `CheckpointError` for a dtype that the format lacks, and for values that `fetch` gives with another shape or dtype.
    """
    metadata = {"format": "pt", **metadata}
    beginning, offsets = lay_out(specs, {**metadata, **(room_for(specs) if checksums else {})})
    write_all(stream, beginning)
    sums: dict[str, str] = {}
    for name in offsets:
        value = _fetched(fetch, name, specs[name]) if _nbytes(specs[name]) else torch.empty(0)
        if checksums:
            sums[name] = checksum(value)
        for part in byte_parts(value):
            write_all(stream, part)
    if checksums:
        stream.seek(0)
        write_all(stream, lay_out(specs, {**metadata, **noted(sums)})[0])


def _write_torch(file: Path, specs: Mapping[str, TensorSpec], fetch: Fetch, aliases: Mapping[str, str]) -> None:
    """As `torch.save` writes a state dict. torch lays the file out with empty tensors, and their bytes are put in one tensor at a time.

    The checksums in the archive stay those of empty tensors: torch checks none.
    """
    with FakeTensorMode():
        values = {name: torch.empty(spec.shape, dtype=spec.dtype, device="cpu") for name, spec in specs.items()}
    with open(file, "wb") as stream, torch.serialization.skip_data(materialize_fake_tensors=True):
        try:
            torch.save(values | {alias: values[first] for alias, first in aliases.items()}, stream)
        except RuntimeError as error:
            # What the stream refused (a full disk) is hidden behind the complaint of torch's writer that positions do not fit.
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
    places = {entry.name: entry.offset for entry in TorchZipFormat().read_header(file).entries}
    with open(file, "r+b", buffering=0) as target:
        for name, spec in specs.items():
            if _nbytes(spec):
                target.seek(places[name])
                for part in byte_parts(_fetched(fetch, name, spec)):
                    write_all(target, part)

"""Files that `torch.save` has written of a state dict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from ...errors import CheckpointError
from ...text import kind_text
from ..entry import Entry
from ..extra_state import is_extra_state
from ..location import CheckpointFile
from .header import START_BYTES, Header, foreign, read_local
from .torch_archive import TorchArchive

__all__ = ["TorchZipFormat"]

ZIP_MAGIC: Final = b"PK"
END_BYTES: Final = 128 << 10
"""Read at once from the end: with most files their whole directory."""


class TorchZipFormat:
    """torch.save's zip archives, read with `weights_only` always."""

    name = "torch"
    suffixes = (".bin", ".pt", ".pth", ".ckpt")
    usual_names = ("pytorch_model", "model", "diffusion_pytorch_model", "adapter_model")

    def read_header(self, file: Path) -> Header:
        """Entries of the state dict in `file`, with the place of their bytes inside the archive.

        Extra states of modules that are no tensors are values of the header.

        Raises `CheckpointError` for a truncated or compressed archive, for one that holds more than plain tensors need, for a file of
        torch before 1.6 (it says how to convert it), and for sparse or quantized tensors.
        """
        return read_local(file, self.header_from)

    def header_from(self, file: CheckpointFile, size_bytes: int, read: Callable[[int, int], bytes]) -> Header:
        """See `RangedFormat` and `read_header`."""
        start = read(0, START_BYTES)
        if not start:
            raise CheckpointError(f"{file}: the file is empty. Get it again.")
        if not start.startswith(ZIP_MAGIC):
            raise CheckpointError(f"{file}: {foreign(start) or _old(file)}")
        archive = TorchArchive(file, size_bytes, read, END_BYTES)
        entries = [archive.entry(name, tensor) for name, tensor in _tensors(archive.content, file).items()]
        values = {
            name: value
            for name, value in archive.content.items()
            if isinstance(name, str) and is_extra_state(name) and not isinstance(value, torch.Tensor)
        }
        entries += [Entry(name, file, 0, 0, torch.uint8, (0,)) for name in values]
        return Header(tuple(entries), values=values, versions=_versions(archive.content))


def _old(file: CheckpointFile) -> str:
    download = "" if isinstance(file, Path) else "download it and "
    return (
        f"not an archive of torch 1.6 or later. If torch can read it, {download}convert it once: "
        f"torch.save(torch.load({file.name!r}, weights_only=True), {file.name!r})."
    )


def _versions(content: Any) -> dict[str, Mapping[str, Any]]:
    """What torch hangs on a state dict for its modules' hooks."""
    noted = getattr(content, "_metadata", None)
    if not isinstance(noted, Mapping):
        return {}
    return {name: told for name, told in noted.items() if isinstance(name, str) and isinstance(told, Mapping)}


def _tensors(content: Any, file: CheckpointFile) -> dict[str, torch.Tensor]:
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{file}: holds {kind_text(content)}, not a state dict (names → tensors).")
    tensors = {name: value for name, value in content.items() if isinstance(name, str) and isinstance(value, torch.Tensor)}
    if not tensors and not all(isinstance(name, str) and is_extra_state(name) for name in content):
        inner = [name for name, value in content.items() if isinstance(value, Mapping) and any(map(torch.is_tensor, value.values()))]
        hint = f" Its item {inner[0]!r} is one: save that alone." if inner else ""
        raise CheckpointError(f"{file}: holds no tensors at its top level, so it is no state dict.{hint}")
    return tensors

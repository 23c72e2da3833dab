"""`bigmodel merge-weights FOLDER OUTPUT`: the parts that the processes of a sharded job have saved, made one model."""

from __future__ import annotations

from typing import Annotated

import typer

from ..loading import Checkpoint
from ..text import bytes_text
from ..training.plugins.fsdp_functions import merge_fsdp_weights
from .output import console, counted, print_json

__all__ = ["merge_weights"]


def merge_weights(
    checkpoint_directory: Annotated[str, typer.Argument(help="The folder of save_state with SHARDED_STATE_DICT, or a model's in it.")],
    output_path: Annotated[str, typer.Argument(help="Folder for model.safetensors, or shards and their index.")],
    unsafe_serialization: Annotated[
        bool, typer.Option("--unsafe_serialization", "--unsafe-serialization", help="Write torch's format, as pytorch_model.bin.")
    ] = False,
    remove_checkpoint_dir: Annotated[
        bool, typer.Option("--remove_checkpoint_dir", "--remove-checkpoint-dir", help="Remove the parts when the model is there.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Makes the parts that a sharded job has saved one model; takes the memory of one tensor, and no processes."""
    merge_fsdp_weights(checkpoint_directory, output_path, not unsafe_serialization, remove_checkpoint_dir)
    written = Checkpoint.open(output_path)
    if as_json:
        print_json({"files": [str(file) for file in written.files], "tensors": len(written.entries), "total_bytes": written.total_bytes})
        return
    tensors, files = counted(len(written.entries), "tensor"), counted(len(written.files), "file")
    console.print(f"{output_path}: {tensors}, {bytes_text(written.total_bytes)} in {files}.", soft_wrap=True)

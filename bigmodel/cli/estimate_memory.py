"""`bigmodel estimate-memory MODEL --dtypes float16 nf4`: how large a model is in several dtypes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Final

import typer
from rich.table import Table
from typer.core import TyperCommand

from ..estimates import estimate_memory as estimates_of
from ..text import bytes_text, printable
from .output import console, print_json

__all__ = ["DtypesCommand", "estimate_memory"]

USUAL: Final = ["float32", "float16", "int8", "int4"]
DTYPES: Final = "--dtypes"


class DtypesCommand(TyperCommand):
    """Lets `--dtypes` be followed by several words: they are those up to the next option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        plain: list[str] = []
        follows = False
        for word in args:
            if word.startswith("-"):
                follows = word == DTYPES
            elif follows and plain[-1] != DTYPES:
                plain.append(DTYPES)
            plain.append(word)
        return super().parse_args(ctx, plain)


def estimate_memory(
    model: Annotated[
        str,
        typer.Argument(help="A repository on the hub (owner/name), a checkpoint (file or folder), a config.json, or a dump of headers."),
    ],
    dtypes: Annotated[
        list[str] | None, typer.Option(DTYPES, help="Dtypes or packed formats, one or several (last, after MODEL); int4 is nf4.")
    ] = None,
    library_name: Annotated[
        str | None, typer.Option("--library_name", "--library-name", help="Found without it; taken for scripts.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust_remote_code", "--trust-remote-code", help="Let code beside the checkpoint run.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """How much memory a model's weights take in several dtypes, and training them with Adam; no weights are read.

    Training counts weights, gradients and two moments, all in that dtype, and no activations. Packed formats leave embeddings in the
    model's own dtype. With activations and a KV cache, and for
    given devices: bigmodel plan.
    """
    found = estimates_of(model, dtypes or USUAL, trust_remote_code=trust_remote_code)
    if as_json:
        print_json([asdict(each) for each in found])
        return
    table = Table("dtype", "largest layer", "total", "training with Adam")
    for each in found:
        training = "" if each.training_bytes is None else bytes_text(each.training_bytes)
        table.add_row(each.dtype, f"{bytes_text(each.largest_bytes)} ({printable(each.largest)})", bytes_text(each.total_bytes), training)
    console.print(printable(model), style="bold", soft_wrap=True)
    console.print(table)
    for note in dict.fromkeys(note for each in found for note in each.notes):
        console.print(note, soft_wrap=True)

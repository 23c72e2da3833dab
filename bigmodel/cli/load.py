"""`bigmodel load CHECKPOINT --check`: whether a checkpoint fills a model, told before anything is read; without `--check` it is read."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ..errors import BigModelError
from ..integrations.transformers import TransformersKeys
from ..loading import Checkpoint, LoadReport, Match, match, materialize
from ..sources import Tree, Wanted, find_tree
from ..text import bytes_text
from .output import console, counted, print_json

__all__ = ["load"]

NAMES_SHOWN = 20


def load(
    checkpoint: Annotated[str, typer.Argument(help="A file, folder or *.index.json, a repository on the hub (owner/name), or a URL.")],
    into: Annotated[
        str | None,
        typer.Option(
            help="The model to fill: a config.json, a folder or repository with one, or another checkpoint. Found beside without it."
        ),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Read headers only, and say what would happen.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compare every file with the hub's hash, or its own checksums.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Whether tensors that the model has no use for are an error.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Checks a checkpoint, alone and against a model: missing, unexpected and misshapen tensors, lost scales.

    The exit code is 1 if it does not fit. Without `--check` the model is then loaded into RAM, and the time that it took is told.
    """
    opened = Checkpoint.open(checkpoint, verify=verify)
    tree = find_tree(into or checkpoint, Wanted())
    found = None if into is None and not tree.is_built else _matched(tree, opened)
    problem = None if found is None else _problem(found, strict)
    report = None
    if not check:
        if found is None:
            raise BigModelError(f"{checkpoint}: there is no model to load it into: name one with --into, or only --check it.")
        if problem is None:
            report = materialize(tree.model, found, {"": "cpu"}, progress=False if as_json else None)
    facts = _facts(opened, tree, found, problem, report)
    if as_json:
        print_json(facts)
    else:
        _print(opened, facts, problem)
    if problem is not None:
        raise typer.Exit(1)


def _matched(tree: Tree, opened: Checkpoint) -> Match:
    if not tree.is_built:
        return match(tree.model, opened)
    model: Any = tree.model
    return match(model, opened, TransformersKeys(model), ignore_missing=list(model._keys_to_ignore_on_load_missing or ()))


def _problem(found: Match, strict: bool) -> str | None:
    try:
        found.check(strict=strict)
    except BigModelError as error:
        return str(error)
    return None


def _facts(opened: Checkpoint, tree: Tree, found: Match | None, problem: str | None, report: LoadReport | None) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "location": str(opened.location),
        "format": opened.format,
        "files": [str(file) for file in opened.files],
        "tensors": len(opened.entries),
        "total_bytes": opened.total_bytes,
        "model": None,
    }
    if found is not None:
        facts |= {
            "model": type(tree.model).__name__ if tree.is_built else tree.name,
            "fits": problem is None,
            "filled": len(found.transfers),
            "model_bytes": sum(transfer.nbytes for transfer in found.transfers.values()),
            "missing": list(found.missing),
            "unexpected": list(found.unexpected),
            "misshapen": [{"name": name, "model": list(model), "checkpoint": list(stored)} for name, model, stored in found.misshapen],
            "unmade": [{"name": name, "why": why} for name, why in found.unmade],
            "refused": [{"name": name, "why": why} for name, why in found.refused],
            "kept": list(found.kept),
            "problem": problem,
        }
    if report is not None:
        facts |= {"seconds": report.seconds, "bytes_read": report.bytes_read, "bytes_per_second": report.bytes_per_second}
    return facts


def _print(opened: Checkpoint, facts: dict[str, Any], problem: str | None) -> None:
    sound = (
        f": {opened.format}, {counted(len(opened.files), 'file')}, {counted(len(opened.entries), 'tensor')}, "
        f"{bytes_text(opened.total_bytes)}. Headers are sound."
    )
    console.print(Text.assemble((str(opened.location), "bold"), sound), soft_wrap=True)
    if facts["model"] is None:
        console.print("No model was named (--into), so nothing else is checked.")
        return
    table = Table("", facts["model"], show_header=True)
    table.add_row("filled", f"{counted(facts['filled'], 'tensor')}, {bytes_text(facts['model_bytes'])}")
    for what in ("missing", "unexpected", "kept"):
        table.add_row(what, _listed(facts[what]))
    table.add_row(
        "misshapen", _listed([f"{each['name']}: {each['model']}, in the checkpoint {each['checkpoint']}" for each in facts["misshapen"]])
    )
    table.add_row("refused", _listed([f"{each['name']}: {each['why']}" for each in facts["refused"]]))
    console.print(table)
    if problem is not None:
        console.print(Text.assemble(("Does not fit. ", "bold red"), problem), soft_wrap=True)
    elif "seconds" in facts:
        rate = f"{bytes_text(round(facts['bytes_per_second']))}/s"
        console.print(f"Loaded into RAM: {bytes_text(facts['bytes_read'])} in {facts['seconds']:.2f} s, {rate}.")
    else:
        console.print("It fits.")


def _listed(names: list[str]) -> str:
    shown = "\n".join(names[:NAMES_SHOWN])
    return shown + (f"\nand {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else "") if names else "none"

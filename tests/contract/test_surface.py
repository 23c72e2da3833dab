"""The catalogue of names that scripts import (`surface.json`): each is there, is what it was, and takes what it took."""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

from bigmodel.training.config_file import DEFAULT_CONFIG_FILE

SURFACE: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("surface.json").read_text(encoding="utf-8"))

ADDED = {
    "load_checkpoint_in_model": ["mmap", "reading", "progress", "progress_callback"],
    "utils.BnbQuantizationConfig": ["pack_embeddings"],
}
"""What calls take besides: by keyword only and optional, so that no old call means anything else."""


def named(path: str) -> Any:
    """What scripts import as `bigmodel.<path>`."""
    module, _, name = f"bigmodel.{path}".rpartition(".")
    return getattr(importlib.import_module(module), name)


def entries(key: str) -> list[Any]:
    """The entries that say something under `key`."""
    return [pytest.param(path, entry, id=path) for path, entry in SURFACE.items() if key in entry]


def as_catalogued(default: Any) -> str:
    """A default as the catalogue writes it: an enum's member by its name, a function without its address, a path of the user's home by what
    it is for, all else as Python does."""
    if isinstance(default, enum.Enum):
        return f"{type(default).__name__}.{default.name}"
    if default == DEFAULT_CONFIG_FILE:
        return "<default_config_file>"
    return re.sub(r" at 0x[0-9a-f]+>$", ">", repr(default))


def parameters(found: Any) -> list[dict[str, Any]]:
    """The parameters of a function or class, as the catalogue writes them."""
    return [
        {
            "name": each.name,
            "kind": each.kind.name.lower(),
            "required": each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD),
            "default": None if each.default is each.empty else as_catalogued(each.default),
        }
        for each in inspect.signature(found).parameters.values()
    ]


def as_written(parameter: dict[str, Any]) -> dict[str, Any]:
    """The catalogue's parameter without the address that a function had in the process that wrote it."""
    default = parameter["default"]
    return parameter | {"default": None if default is None else re.sub(r" at 0x[0-9a-f]+>$", ">", default)}


def test_the_catalogue_is_complete() -> None:
    assert len(SURFACE) == 81
    assert {entry["kind"] for entry in SURFACE.values()} == {"function", "class", "enum", "constant"}


@pytest.mark.parametrize(("path", "entry"), entries("kind"))
def test_every_name_is_of_its_kind(path: str, entry: dict[str, Any]) -> None:
    found = named(path)
    kind = (
        "enum" if isinstance(found, enum.EnumMeta) else "class" if inspect.isclass(found) else "function" if callable(found) else "constant"
    )
    assert kind == entry["kind"]


@pytest.mark.parametrize(("path", "entry"), entries("parameters"))
def test_every_call_takes_what_it_took(path: str, entry: dict[str, Any]) -> None:
    found = parameters(named(path))
    added = [each for each in found if each["name"] in ADDED.get(path, [])]
    assert [each["name"] for each in added] == ADDED.get(path, [])
    assert all(each["kind"] == "keyword_only" and not each["required"] for each in added)
    assert [each for each in found if each not in added] == [as_written(each) for each in entry["parameters"]]


@pytest.mark.parametrize(("path", "entry"), entries("methods"))
def test_every_method_is_there(path: str, entry: dict[str, Any]) -> None:
    assert [name for name in entry["methods"] if not callable(getattr(named(path), name, None))] == []


@pytest.mark.parametrize(("path", "entry"), entries("members"))
def test_every_choice_has_its_members(path: str, entry: dict[str, Any]) -> None:
    assert {member.name: member.value for member in named(path)} == entry["members"]


@pytest.mark.parametrize(("path", "entry"), entries("value"))
def test_every_constant_has_its_value(path: str, entry: dict[str, Any]) -> None:
    assert named(path) == entry["value"]

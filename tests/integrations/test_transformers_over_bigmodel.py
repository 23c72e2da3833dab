"""transformers' own paths (`from_pretrained` with a device map, `generate`, pipelines, `Trainer`) over bigmodel in accelerate's place."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import transformers
from accelerate_stand_in import run_over_stand_in, write_stand_in

from bigmodel.utils import is_deepspeed_available

SCRIPTS = Path(__file__).parent / "over_stand_in"

ABSENT: dict[tuple[str, str], str] = {
    ("accelerate.utils.imports", "is_fp8_available"): "asked by transformers' own test decorators alone, which no user imports",
}
"""Names that bigmodel does not have, and why."""

LOSS_TOLERANCE = 1e-5
"""Relative, where sums are made in another order: over two processes, or over accumulated batches."""


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stand_in(tmp_path_factory.mktemp("stand-in"))


def names_asked_for() -> set[tuple[str, str]]:
    """Every name that transformers imports from accelerate, in functions too, with its module."""
    found = set()
    for file in Path(transformers.__file__).parent.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if "from accelerate" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "accelerate":
                found.update((str(node.module), alias.name) for alias in node.names)
    return found


def test_every_name_that_transformers_imports_is_there() -> None:
    asked = names_asked_for()
    assert ("accelerate.hooks", "add_hook_to_module") in asked
    missing = set()
    for module, name in asked:
        own = module.replace("accelerate", "bigmodel", 1)
        if importlib.util.find_spec(own) is None or not hasattr(importlib.import_module(own), name):
            missing.add((module, name))
    assert missing <= ABSENT.keys()


def test_models_on_several_devices(stand_in: Path, tmp_path: Path) -> None:
    found = run_over_stand_in(stand_in, SCRIPTS / "models.py", str(tmp_path))[0]
    assert found.pop("module") == "bigmodel"
    same = {"output": True, "tokens": True, "saved": True}
    mapped = {name: found.pop(name) for name in [*found] if name.startswith("mapped")}
    assert {name: each | {"devices": None} if isinstance(each, dict) else each for name, each in mapped.items()} == {
        name: same | {"devices": None} for name in mapped
    }
    assert [each["devices"] for each in mapped.values()].count(["cpu", "disk"]) == len(mapped) - 2
    assert "with bigmodel.execution_devices()" in found["resized"].pop("message")
    assert found == {
        "pipeline": {"same": True, "device": "cpu"},
        "resized": {"same": True, "shape": [2, 7, 100]},
        "trained through": {"same": True, "outside reads": {}},
        "a hook made anew": {"same": True, "weights": True},
        "a module at a time": {"same": True},
        "told": {"Accelerate version": "1.15.0", "Accelerate config": "\tnot found"},
    }


def close(value: Any) -> Any:
    return pytest.approx(value, rel=LOSS_TOLERANCE)


def of_a_job(loop: dict[str, Any], sharded: int) -> dict[str, Any]:
    """What a job comes to that does the steps of `loop`."""
    outcome = {"again": close(loop["loss"]), "same": True, "sharded": sharded, "predictions": [11, 8, 96], "labels": True}
    return {name: close(value) for name, value in loop.items()} | outcome


def test_trainer_in_one_process(stand_in: Path, tmp_path: Path) -> None:
    cases = ["loop", "loop in bf16", "loop of 8", "fp32", "bf16", "accumulated", "best", "fitted"]
    if is_deepspeed_available():
        cases += ["zero", "zero, accumulated"]
    found = run_over_stand_in(stand_in, SCRIPTS / "trained.py", str(tmp_path), *cases)[0]
    loop, half, wide = (found[case] for case in cases[:3])
    assert found["fp32"] == of_a_job(loop, 0)
    assert found["fp32"]["loss"] == found["fp32"]["again"] == loop["loss"]
    assert found["fp32"]["grad_norm"] == loop["grad_norm"]
    assert found["bf16"] == {"loss": half["loss"], "grad_norm": half["grad_norm"]}
    assert found["accumulated"] == {"loss": close(wide["loss"]), "grad_norm": close(wide["grad_norm"])}
    assert found["best"] == {"same": True, "left": 1}
    assert found["fitted"] == {"batch": 2, "steps": 4}
    for case, same in (("zero", loop), ("zero, accumulated", wide)):
        if case in cases:
            assert found[case] == {"loss": close(same["loss"]), "grad_norm": close(same["grad_norm"])}


def test_trainer_in_two_processes(stand_in: Path, tmp_path: Path) -> None:
    for found in run_over_stand_in(stand_in, SCRIPTS / "trained.py", str(tmp_path), "loop", "fp32", "sharded", processes=2):
        assert found["fp32"] == of_a_job(found["loop"], 0)
        assert found["sharded"] == of_a_job(found["loop"], 39)

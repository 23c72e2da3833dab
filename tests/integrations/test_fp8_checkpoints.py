"""Checkpoints of 8-bit floats with a scale for each block, as DeepSeek's, become the floating models that they stand for."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_transformers
import torch
from safetensors.torch import load_file, save_file

from bigmodel.integrations.transformers import from_pretrained

LINEAR = re.compile(r"(proj|gate_proj|up_proj|down_proj|q_a_proj|w[123])\.weight$")


def packed(folder: Path, target: Path) -> tuple[Path, Path]:
    """The checkpoint with its linear layers in 8-bit floats (tiny ones are one block each), and the same values as plain floats."""
    fp8, plain = target / "fp8", target / "plain"
    for made in (fp8, plain):
        shutil.copytree(folder, made)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        values = dict(tensors)
        for name in [name for name in tensors if LINEAR.search(name)]:
            scale = tensors[name].abs().max().float() / 448
            tensors[name] = (tensors[name].float() / scale).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale.view(1, 1)
            values[name] = tensors[name].float() * scale
            index["weight_map"][f"{name}_scale_inv"] = file.name
        save_file(tensors, fp8 / file.name, metadata={"format": "pt"})
        save_file(values, plain / file.name, metadata={"format": "pt"})
    (fp8 / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (fp8 / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return fp8, plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "qwen3_moe", "mixtral"])
def test_the_values_are_those_that_the_scales_make(
    name: str, dtype: torch.dtype, checkpoint_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, plain = packed(checkpoint_folder(name), tmp_path)
    expected = tiny_transformers.reference(plain, name, dtype=dtype)
    model = from_pretrained(folder, dtype=dtype, device_map="cpu", strict=True)
    own, theirs = model.state_dict(), expected.state_dict()
    assert own.keys() == theirs.keys()
    assert all(own[key].dtype == value.dtype for key, value in theirs.items())
    different = [key for key, value in theirs.items() if not torch.equal(own[key], value)]
    assert different == []
    assert getattr(model.config, "quantization_config", None) is None


def test_the_disk_tier_multiplies_too(checkpoint_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder, _ = packed(checkpoint_folder("qwen3_moe"), tmp_path)
    inputs = tiny_transformers.FAMILIES["qwen3_moe"].inputs()
    with torch.no_grad():
        expected = from_pretrained(folder, device_map="cpu")(**inputs).logits
        assert torch.equal(from_pretrained(folder, device_map={"": "disk"})(**inputs).logits, expected)

"""Models of transformers in the integers of GPTQ, AWQ and compressed-tensors are loaded as the floats that these stand for."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_transformers
import torch
from safetensors.torch import load_file, save_file

import bigmodel
from bigmodel import from_pretrained
from bigmodel.errors import CheckpointError

State = dict[str, torch.Tensor]
GROUP = 16
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}


def words(values: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """(rows, columns) → int32 (rows, columns / 8)."""
    parts = values.long().view(len(values), -1, 8)[:, :, order] << 4 * torch.arange(8)
    return parts.sum(-1).to(torch.int32)


def gptq(name: str, integers: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> State:
    return {
        f"{name}.qweight": words(integers).T.contiguous(),
        f"{name}.qzeros": words((zero.T - 1) % 16),
        f"{name}.scales": scale.T.contiguous(),
        f"{name}.g_idx": (torch.arange(integers.shape[1]) // GROUP).to(torch.int32),
    }


def awq(name: str, integers: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> State:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        f"{name}.qweight": words(integers.T, order),
        f"{name}.qzeros": words(zero.T, order),
        f"{name}.scales": scale.T.contiguous(),
    }


def compressed(name: str, integers: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> State:
    return {
        f"{name}.weight_packed": words(integers),
        f"{name}.weight_scale": scale,
        f"{name}.weight_zero_point": words(zero.T).T.contiguous(),
        f"{name}.weight_shape": torch.tensor(integers.shape),
    }


METHODS: dict[str, tuple[Callable[..., State], dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False, "checkpoint_format": "gptq"}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "compressed-tensors": (
        compressed,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS | {"symmetric": False}}},
            "ignore": ["lm_head"],
        },
    ),
}


def packed(source: Path, folder: Path, method: str) -> dict[str, torch.Tensor]:
    """Makes a packed checkpoint of another one, and gives the values that it stands for."""
    pack, described = METHODS[method]
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    tensors = {name: value for file in source.glob("*.safetensors") for name, value in load_file(file).items()}
    meaning, state = {}, {}
    for seed, (name, value) in enumerate(sorted(tensors.items())):
        if "proj" not in name and ".w1" not in name and ".w2" not in name and ".w3" not in name:
            state[name] = value
            continue
        generator = torch.Generator().manual_seed(seed)
        rows, columns = value.shape
        integers = torch.randint(0, 16, (rows, columns), generator=generator)
        scale = (torch.rand(rows, columns // GROUP, generator=generator) * 0.02 + 0.001).half()
        zero = torch.randint(0, 16, scale.shape, generator=generator)
        meaning[name] = ((integers.view(rows, -1, GROUP) - zero[..., None]) * scale[..., None].double()).view(rows, columns).float()
        state |= pack(name.removesuffix(".weight"), integers, scale, zero)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": described}))
    return meaning


@pytest.mark.parametrize("method", METHODS)
def test_a_model_is_loaded_as_floats_wherever_it_rests(method: str, checkpoint_folder: Callable[[str], Path], tmp_path: Path) -> None:
    meaning = packed(checkpoint_folder("llama"), tmp_path / "packed", method)
    assert len(meaning) == 28
    logits = []
    for device_map in ("cpu", {"": "disk"}):
        model = from_pretrained(tmp_path / "packed", dtype=torch.float32, device_map=device_map, strict=True)
        state = model.state_dict()
        assert all(torch.equal(state[name].to("cpu"), value) for name, value in meaning.items())
        assert getattr(model.config, "quantization_config", None) is None
        with torch.no_grad():
            logits.append(model(**tiny_transformers.FAMILIES["llama"].inputs()).logits)
    assert torch.equal(*logits)
    made = bigmodel.plan(tmp_path / "packed", {0: "1GB"}, dtype=torch.float32)
    assert made.total_bytes >= sum(4 * value.numel() for value in meaning.values())


@pytest.mark.parametrize("method", METHODS)
def test_experts_are_stacked_of_their_values(method: str, checkpoint_folder: Callable[[str], Path], tmp_path: Path) -> None:
    meaning = packed(checkpoint_folder("mixtral"), tmp_path / "packed", method)
    model = from_pretrained(tmp_path / "packed", dtype=torch.float32, device_map="cpu", strict=True)
    prefix = "model.layers.1.block_sparse_moe.experts"
    for number, found in enumerate(model.model.layers[1].mlp.experts.gate_up_proj):
        assert torch.equal(found, torch.cat([meaning[f"{prefix}.{number}.{part}.weight"] for part in ("w1", "w3")]))


def test_a_packed_checkpoint_is_packed_anew_in_another_format(checkpoint_folder: Callable[[str], Path], tmp_path: Path) -> None:
    packed(checkpoint_folder("llama"), tmp_path / "packed", "gptq")
    floats = from_pretrained(tmp_path / "packed", dtype=torch.float32, device_map="cpu")
    floats.save_pretrained(tmp_path / "floats")
    found = [from_pretrained(tmp_path / name, dtype=torch.float32, quantization="nf4", device_map="cpu") for name in ("packed", "floats")]
    inputs = tiny_transformers.FAMILIES["llama"].inputs()
    with torch.no_grad():
        assert torch.equal(*[model(**inputs).logits for model in found])


@pytest.mark.parametrize(
    "described",
    [
        METHODS["compressed-tensors"][1] | {"config_groups": {"group_0": {"weights": WEIGHTS | {"num_bits": 8}}}},
        METHODS["compressed-tensors"][1] | {"transform_config": {"config_groups": {"R1": {}}}},
        METHODS["compressed-tensors"][1] | {"sparsity_config": {"format": "sparse-24-bitmask"}},
    ],
)
def test_what_is_more_than_integers_is_refused(described: dict[str, Any], checkpoint_folder: Callable[[str], Path], tmp_path: Path) -> None:
    packed(checkpoint_folder("llama"), tmp_path / "packed", "compressed-tensors")
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config | {"quantization_config": described}))
    with pytest.raises(CheckpointError, match=r"quantization_config says compressed-tensors"):
        from_pretrained(tmp_path / "packed", device_map="cpu")


@pytest.mark.parametrize(
    "described",
    [
        METHODS["compressed-tensors"][1] | {"config_groups": [1]},
        METHODS["compressed-tensors"][1] | {"config_groups": {"group_0": {"weights": [4]}}},
        METHODS["compressed-tensors"][1] | {"config_groups": {"group_0": {"weights": WEIGHTS, "format": ["pack-quantized"]}}},
        METHODS["compressed-tensors"][1] | {"sparsity_config": "dense", "config_groups": 3},
        METHODS["gptq"][1] | {"bits": "4"},
        METHODS["gptq"][1] | {"bits": [4]},
        METHODS["gptq"][1] | {"checkpoint_format": ["gptq"]},
        METHODS["gptq"][1] | {"quant_method": None},
        METHODS["gptq"][1] | {"quant_method": ["gptq"]},
        "gptq",
        [METHODS["gptq"][1]],
    ],
)
def test_a_damaged_configuration_is_refused(described: object, checkpoint_folder: Callable[[str], Path], tmp_path: Path) -> None:
    packed(checkpoint_folder("llama"), tmp_path / "packed", "gptq")
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config | {"quantization_config": described}))
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / "packed"))):
        from_pretrained(tmp_path / "packed", device_map="cpu")

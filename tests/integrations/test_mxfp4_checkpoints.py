"""gpt-oss as it is shipped: experts in MXFP4 become the floats that transformers makes of them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_transformers
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from bigmodel import from_pretrained
from bigmodel.errors import CheckpointError

EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint in the shipped form, and its blocks and scales by name. Widths are whole blocks of 32."""
    folder = tmp_path_factory.mktemp("gpt_oss") / "packed"
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        **tiny_transformers.TEXT | {"hidden_size": 64, "intermediate_size": 64},
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=4,
    )
    transformers.GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    packed = {}
    for name in [name for name in tensors if EXPERTS.search(name)]:
        experts, columns, rows = tensors.pop(name).shape
        packed[f"{name}_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        packed[f"{name}_scales"] = torch.randint(115, 125, (experts, rows, columns // 32), dtype=torch.uint8)
    assert packed
    save_file(tensors | packed, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return folder, packed


@pytest.mark.parametrize("device_map", ["cpu", {"": "disk"}], ids=str)
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_values_are_those_of_transformers(shipped: tuple[Path, dict[str, torch.Tensor]], dtype: torch.dtype | None, device_map) -> None:
    folder, packed = shipped
    model = from_pretrained(folder, dtype=dtype, device_map=device_map, strict=True)
    state = model.state_dict()
    for name in [name.removesuffix("_blocks") for name in packed if name.endswith("_blocks")]:
        expected = convert_moe_packed_tensors(packed[f"{name}_blocks"], packed[f"{name}_scales"], dtype=dtype or torch.bfloat16)
        assert torch.equal(state[name].to("cpu"), expected), name
    assert getattr(model.config, "quantization_config", None) is None
    ids = torch.randint(3, tiny_transformers.VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.isfinite(model(ids).logits).all()


@pytest.mark.parametrize(
    "method",
    [
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        {"quant_method": "gptq", "bits": 3},
        {"quant_method": "mxfp4"},
    ],
    ids=lambda method: "-".join(map(str, method.values())),
)
def test_checkpoints_quantized_in_other_ways_are_refused(
    method: dict[str, object], checkpoint_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "quantized"
    shutil.copytree(checkpoint_folder("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    with pytest.raises(CheckpointError, match=rf"is quantized \(its quantization_config says {method['quant_method']}\)"):
        from_pretrained(folder, device_map="cpu")

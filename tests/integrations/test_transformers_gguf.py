"""GGUF files fill transformers models: the values that transformers' own reading of the same file gives, wherever they rest."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from transformers import modeling_gguf_pytorch_utils as theirs

from bigmodel import from_pretrained, load_and_dispatch
from bigmodel.errors import CheckpointError, MatchError
from bigmodel.integrations.transformers import TransformersKeys, empty_model
from bigmodel.integrations.transformers import gguf as module
from bigmodel.loading import Checkpoint
from bigmodel.sources import Wanted, find_tree

WIDTH, VOCABULARY, LAYERS = 64, 96, 2

NUMBERS = {
    "context_length": 64,
    "embedding_length": WIDTH,
    "block_count": LAYERS,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "vocab_size": VOCABULARY,
}


@dataclass
class Architecture:
    """A kind of model in GGUF: its name there, its class, and what its metadata says beyond `NUMBERS`."""

    name: str
    class_name: str
    numbers: dict[str, int] = field(default_factory=dict)
    epsilon: str = "attention.layer_norm_rms_epsilon"


EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}

ARCHITECTURES = {
    each.name: each
    for each in [
        Architecture("llama", "LlamaForCausalLM", {"rope.dimension_count": 16}),
        Architecture("qwen2", "Qwen2ForCausalLM"),
        Architecture("gemma2", "Gemma2ForCausalLM", {"attention.key_length": 16, "attention.sliding_window": 32}),
        Architecture("gpt2", "GPT2LMHeadModel", epsilon="attention.layer_norm_epsilon"),
        Architecture("qwen3moe", "Qwen3MoeForCausalLM", {"attention.key_length": 16} | EXPERTS),
    ]
}


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    seed = sum(map(ord, name))
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32) * np.float32(0.1) + np.float32("norm" in name)


def packing(name: str, shape: tuple[int, ...]) -> Kind | None:
    """A mixture, as files have it: vectors in float32, matrices packed in several ways."""
    if len(shape) == 1 or shape[-1] % 32:
        return None
    return (Kind.Q8_0, Kind.Q4_0, Kind.F16, Kind.BF16)[sum(map(ord, name)) % 4]


def write(file: Path, kind: Architecture, tensors: dict[str, np.ndarray], tokens: list[str] | None = None) -> Path:
    """`tokens`: of a tokenizer of single bytes, which is left out without them."""
    writer = gguf.GGUFWriter(file, kind.name)
    if tokens is not None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(tokens)
        writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
        writer.add_token_merges([f"{tokens[0]} {tokens[1]}"])
        writer.add_eos_token_id(len(tokens) - 1)
    writer.add_string("general.name", "tiny")
    for key, number in (NUMBERS | kind.numbers).items():
        writer.add_uint32(f"{kind.name}.{key}", number)
    writer.add_float32(f"{kind.name}.{kind.epsilon}", 1e-5)
    for name, array in tensors.items():
        packed = packing(name, array.shape)
        writer.add_tensor(name, array if packed is None else gguf.quantize(array, packed), raw_dtype=packed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def tensors_of(kind: Architecture, folder: Path) -> dict[str, np.ndarray]:
    """Random tensors under the names and in the shapes that llama.cpp gives to those of a model, by transformers' tables."""
    config = transformers.AutoConfig.from_pretrained(
        folder, gguf_file=write(folder / "config.gguf", kind, {"output.weight": values("o", (2, 2))}).name
    )
    with torch.device("meta"):
        model = getattr(transformers, kind.class_name)(config)
    processor = theirs.TENSOR_PROCESSORS.get(kind.name, theirs.TensorProcessor)(config=config.to_dict())
    table = theirs.get_gguf_hf_weights_map(model, processor)
    state = model.state_dict()
    found = {}
    for name, target in table.items():
        if target not in state:
            continue
        shape = tuple(state[target].shape)
        if "ffn_gate_exps" in name or "ffn_up_exps" in name:
            shape = (shape[0], shape[1] // 2, shape[2])
        if kind.name == "gpt2" and len(shape) == 2 and any(part in name for part in ("attn_qkv", "ffn_", "attn_output")):
            shape = shape[::-1]
        found[name if name.endswith((".weight", ".bias")) else f"{name}.weight"] = values(name, shape)
    (folder / "config.gguf").unlink()
    return found


@pytest.fixture(scope="module", params=ARCHITECTURES)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A file, and the model as transformers' own reading of it fills it."""
    kind = ARCHITECTURES[request.param]
    folder = tmp_path_factory.mktemp(kind.name)
    file = write(folder / "model.gguf", kind, tensors_of(kind, folder))
    config = transformers.AutoConfig.from_pretrained(folder, gguf_file=file.name)
    model = getattr(transformers, kind.class_name)(config)
    expected = theirs.load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    absent, unknown = model.load_state_dict(expected, strict=False)
    assert not unknown
    assert not set(absent) - set(model.all_tied_weights_keys)
    return file, model.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device_map", ["cpu", {"": "disk"}], ids=str)
def test_values_are_those_of_transformers(written: tuple[Path, Any], device_map: Any, dtype: torch.dtype) -> None:
    file, expected = written
    model = from_pretrained(file, device_map=device_map, dtype=dtype)
    assert isinstance(model, type(expected))
    state = model.state_dict()
    assert state.keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        assert torch.equal(state[name].to("cpu"), value.to(dtype)), name
    if dtype == torch.float32:
        ids = torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            assert torch.allclose(model(ids).logits, expected(ids).logits, rtol=1e-4, atol=1e-5)


def test_a_folder_with_one_file_is_that_file(written: tuple[Path, Any]) -> None:
    file, expected = written
    model = from_pretrained(file.parent, device_map="cpu")
    assert torch.equal(next(model.parameters()), next(expected.parameters()))


@pytest.mark.parametrize("device_map", ["cpu", {"": "disk"}], ids=str)
def test_what_is_saved_is_a_checkpoint_of_transformers(written: tuple[Path, Any], device_map: Any, tmp_path: Path) -> None:
    file, expected = written
    from_pretrained(file, device_map=device_map).save_pretrained(tmp_path / "saved")
    again = type(expected).from_pretrained(tmp_path / "saved")
    for name, value in expected.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_plans_and_checks_know_the_model_in_the_file(written: tuple[Path, Any]) -> None:
    file, expected = written
    tree = find_tree(file, Wanted())
    assert tree.is_built
    assert type(tree.model) is type(expected)
    done = subprocess.run(
        [sys.executable, "-m", "bigmodel", "load", str(file), "--check", "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["fits"]


def test_of_files_that_transformers_does_not_know_the_headers_are_planned(tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", Architecture("grok", ""), {"output.weight": values("o", (2, 2))})
    tree = find_tree(file, Wanted())
    assert not tree.is_built
    assert [name for name, _ in tree.model.named_parameters()] == ["output.weight"]
    assert any("Its own configuration was of no use" in note and "grok" in note for note in tree.notes)


def rotary_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """The order in which llama.cpp keeps the rows of q and k: both halves of a head alternate."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


@pytest.mark.parametrize("reordered_bytes", [1, 16 * WIDTH * 4 * 3, 16 << 20])
def test_a_llama_comes_back_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reordered_bytes: int) -> None:
    monkeypatch.setattr(module, "REORDERED_BYTES", reordered_bytes)
    monkeypatch.setattr("test_transformers_gguf.packing", lambda name, shape: None)
    kind = ARCHITECTURES["llama"]
    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=96,
        vocab_size=VOCABULARY,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
    )
    torch.manual_seed(0)
    original = transformers.LlamaForCausalLM(config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    tensors = {}
    for name, value in original.state_dict().items():
        rows = value.numpy()
        if "q_proj" in name or "k_proj" in name:
            rows = rotary_order(rows, 4 if "q_proj" in name else 2)
        tensors[f"{names.get_name(name.removesuffix('.weight'))}.weight"] = np.ascontiguousarray(rows)
    file = write(tmp_path / "model.gguf", kind, tensors | {"rope_freqs.weight": values("rope", (8,))})
    model = from_pretrained(file, device_map="cpu")
    assert model.state_dict().keys() == original.state_dict().keys()
    for name, value in original.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_key_rules_alone_serve_a_model_built_elsewhere(written: tuple[Path, Any]) -> None:
    file, expected = written
    model = empty_model(file)
    load_and_dispatch(model, Checkpoint.open(file), device_map={"": "cpu"}, rules=TransformersKeys(model))
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_what_transformers_has_no_tables_for_is_refused_by_name(tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", Architecture("grok", ""), {"output.weight": values("o", (2, 2))})
    with pytest.raises(CheckpointError, match=r"model\.gguf.*grok"):
        from_pretrained(file, device_map="cpu")


def test_an_unknown_way_of_filling_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interleaving(theirs.TensorProcessor):
        def process(self, weights: Any, name: str, **how: Any) -> Any:
            if "ffn_down" in name:
                how["parsed_parameters"]["tensors"]["model.layers.0.mlp.down_proj.weight"] = torch.from_numpy(weights[::-1].copy())
                return theirs.GGUFTensor(weights, None, {})
            return theirs.GGUFTensor(weights, name, {})

    kind = ARCHITECTURES["llama"]
    file = write(tmp_path / "model.gguf", kind, tensors_of(kind, tmp_path))
    monkeypatch.setitem(theirs.TENSOR_PROCESSORS, "llama", Interleaving)
    with pytest.raises(MatchError, match=r"blk\.0\.ffn_down\.weight.*known to transformers only"):
        from_pretrained(file, device_map="cpu")


def test_a_mapping_of_names_is_refused(written: tuple[Path, Any]) -> None:
    with pytest.raises(MatchError, match="key_mapping"):
        from_pretrained(written[0], device_map="cpu", key_mapping={"a": "b"})


def test_damage_is_named_whatever_transformers_makes_of_it(tmp_path: Path) -> None:
    kind = ARCHITECTURES["llama"]
    file = write(tmp_path / "model.gguf", kind, tensors_of(kind, tmp_path))
    whole = file.read_bytes()
    header_bytes = len(whole) - sum(entry.nbytes for entry in Checkpoint.open(file).entries.values())
    file.write_bytes(whole[:-3000])
    with pytest.raises(CheckpointError, match=r"model\.gguf: truncated: expected at least \d+ bytes, found"):
        from_pretrained(file, device_map="cpu")
    said = []
    for place in range(8, header_bytes, 37):
        damaged = bytearray(whole)
        damaged[place] ^= 64
        file.write_bytes(damaged)
        try:
            from_pretrained(file, device_map="cpu")
        except (CheckpointError, MatchError) as error:
            said.append(str(error))
    assert len(said) > 5
    assert all(str(file) in each for each in said)


def test_several_files_in_a_folder_are_told(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / f"{name}.gguf", ARCHITECTURES["llama"], {"output.weight": values("o", (2, 2))})
    with pytest.raises(CheckpointError, match=r"a\.gguf.*b\.gguf"):
        from_pretrained(tmp_path, device_map="cpu")
